# SPDX-License-Identifier: Apache-2.0
"""The user's choices of how a Replicator does its work; none changes what it computes.

They are arguments of `Replicator`, checked once and passed to the code that needs them:
variables/default_placement.py reads `variables` and has its values, step/building.py
reads `build`, the lowerings `policy`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from replicator import arguments, errors
from replicator.costs import rates
from replicator.costs.cost import ALGORITHM_NAMES, Policy

BUILDS = ("trace", "clone")


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of one Replicator; see its arguments.

    Attributes:
        check: Whether all values that have no mean are compared in each step.
        variables: Where variables live.
        algorithm: The algorithm of reductions, one of ALGORITHM_NAMES; None: the
            cheapest for each.
        fusion: Whether small tensors that are reduced together are sent together.
        factors: Whether sums of matrix products may send the factors instead.
        kernels: Whether products that are slow on CPUs are computed the other way
            around.
        build: How the replicas' sub-graphs are built, one of BUILDS.
        calibration: What operations cost.

    Raises:
        ArgumentError: An option has an invalid value.
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
        check("Replicator", "algorithm", self.algorithm, (None, *ALGORITHM_NAMES))
        check("Replicator", "build", self.build, BUILDS)
        for name in ("check", "fusion", "factors", "kernels"):
            check("Replicator", name, getattr(self, name), (False, True))

    @property
    def policy(self) -> Policy:
        """The options that lowerings use."""
        return Policy(self.algorithm, self.fusion, self.factors, self.calibration)


def check(caller: str, name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises ArgumentError unless the value of an option is one of its choices."""
    if not arguments.is_choice(value, choices):
        raise errors.ArgumentError(
            f"{caller} was given {name}={errors.repr_of(value)}.",
            fix=f"{name} is one of {', '.join(map(repr, choices))}.",
        )
