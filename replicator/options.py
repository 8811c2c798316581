# SPDX-License-Identifier: Apache-2.0
"""What a user can choose about how a Replicator does its work; never what it computes.

The arguments of `Replicator` that are kept, checked once, and handed to whoever does
the work: variables/creation.py asks for `variables`, step/building.py for `build`, the
lowerings for `policy`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from replicator import arguments, errors
from replicator.costs import rates
from replicator.costs.cost import ALGORITHM_NAMES, Policy

VARIABLES = ("mirrored", "sharded", "auto")
BUILDS = ("trace", "clone")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one Replicator; see its arguments.

    Attributes:
        check: Whether all that has no mean is compared in each step.
        variables: Where variables live, one of VARIABLES.
        algorithm: How reductions are done, one of ALGORITHM_NAMES; None: the cheapest
            for each.
        fusion: Whether small tensors that are reduced together travel together.
        factors: Whether sums of matrix products may move the factors instead.
        kernels: Whether products that are slow on CPUs are made the other way around.
        build: How the replicas' sub-graphs come to be, one of BUILDS.
        calibration: What work costs.

    Raises:
        ArgumentError: An option has a value that it cannot have.
    """

    check: bool = False
    variables: str = "auto"
    algorithm: str | None = None
    fusion: bool = True
    factors: bool = True
    kernels: bool = True
    build: str = "trace"
    calibration: rates.Calibration = rates.Calibration()

    def __post_init__(self) -> None:
        _check("variables", self.variables, VARIABLES)
        _check("algorithm", self.algorithm, (None, *ALGORITHM_NAMES))
        _check("build", self.build, BUILDS)
        for name in ("check", "fusion", "factors", "kernels"):
            _check(name, getattr(self, name), (False, True))

    @property
    def policy(self) -> Policy:
        """What the lowerings ask for."""
        return Policy(self.algorithm, self.fusion, self.factors, self.calibration)


def _check(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if not arguments.is_choice(value, choices):
        raise errors.ArgumentError(
            errors.compose(
                f"Replicator was given {name}={errors.shown(value)}.",
                fix=f"{name} is one of {', '.join(map(repr, choices))}.",
            )
        )
