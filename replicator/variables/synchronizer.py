# SPDX-License-Identifier: Apache-2.0
"""A variable's synchronizer: how its gradients are made equal on all replicas.

Plain data, validated on construction. Strategies are made of them, and a variable's
description (chooser.py) holds the one that its strategy gave it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicator import arguments, errors

ALGORITHMS = {"RING": "ring", "NCCL": "nccl"}  # what a spec names, if it names one
SPECS = ("AUTO", "NCCL", "RING")


def error(
    problem: str, fix: str, sites: Sequence[str] | None = None
) -> errors.StrategyError:
    """Returns the error for an invalid strategy.

    Args:
        problem: One sentence.
        fix: How to correct it.
        sites: As for `errors.compose`.
    """
    return errors.StrategyError(problem, sites, fix)


@dataclasses.dataclass(frozen=True)
class PSSynchronizer:
    """The variable is on one device, which reduces and applies its gradients.

    Example:
        >>> replicator.strategy.PSSynchronizer("CPU:1").sync
        True

    Attributes:
        reduction_destination: The device, which need not be a replica's.
        local_replication: Whether each replica has a copy, refreshed after each update,
            instead of reading the variable where it is.
        sync: Whether an update waits for the gradients of all replicas.
        staleness: How many steps the fastest replica may be ahead of the slowest.
        compressor: Compresses gradients in transit; "" for none.
    """

    reduction_destination: str
    local_replication: bool = False
    sync: bool = True
    staleness: int = 0
    compressor: Any = ""

    def __post_init__(self) -> None:
        name = self.reduction_destination
        if not isinstance(name, str) or not name:
            raise error(
                f"a PSSynchronizer was given reduction_destination="
                f"{errors.repr_of(name)}.",
                'name a device, e.g. "CPU:0".',
            )
        check_ps("a PSSynchronizer", self.local_replication, self.sync, self.staleness)
        check_compressor("a PSSynchronizer", self.compressor)


@dataclasses.dataclass(frozen=True)
class AllReduceSynchronizer:
    """Each replica has the variable, and gradients are reduced for all of them.

    Example:
        >>> replicator.strategy.AllReduceSynchronizer(group=1).spec
        'AUTO'

    Attributes:
        spec: "AUTO": the cheapest algorithm; "NCCL": NVIDIA's library, where all
            replicas are on whole GPUs of one host, else as AUTO; "RING": around a ring.
        compressor: Compresses gradients in transit; "" for none.
        group: Only small gradients of the same group share a bucket.
    """

    spec: str = "AUTO"
    compressor: Any = ""
    group: int = 0

    def __post_init__(self) -> None:
        check_spec("an AllReduceSynchronizer", self.spec)
        check_compressor("an AllReduceSynchronizer", self.compressor)
        if not arguments.is_whole(self.group):
            raise error(
                f"an AllReduceSynchronizer was given "
                f"group={errors.repr_of(self.group)}.",
                "groups are numbered from 0 on.",
            )


Synchronizer = PSSynchronizer | AllReduceSynchronizer


def check_ps(who: str, replication: Any, sync: Any, staleness: Any) -> None:
    """Raises StrategyError unless the options of a parameter server are consistent."""
    for name, value in (("local replication", replication), ("sync", sync)):
        if not isinstance(value, bool):
            raise error(
                f"{who} was given {name} {errors.repr_of(value)}.", "pass a bool."
            )
    if not arguments.is_whole(staleness):
        raise error(
            f"{who} was given staleness={errors.repr_of(staleness)}.",
            "pass a number of steps: an int of at least 0.",
        )
    if staleness and not sync:
        raise error(
            f"{who} was given staleness={staleness} with sync=False: replicas that do "
            "not wait for one another keep to no bound.",
            "pass sync=True for a bound, or staleness=0 for none.",
        )


def check_spec(who: str, spec: Any) -> None:
    """Raises StrategyError unless an all-reduce's spec is known."""
    if not arguments.is_choice(spec, SPECS):
        raise error(
            f"{who} was given spec={errors.repr_of(spec)}.",
            f"pass one of {', '.join(SPECS)}.",
        )


def check_compressor(who: str, compressor: Any) -> None:
    """Raises StrategyError unless this can be a compressor: a text, or an object."""
    excluded = bool | int | float | complex | bytes | list | tuple | dict | set
    if compressor is None or isinstance(compressor, excluded | type):
        raise error(
            f"{who} was given compressor={errors.repr_of(compressor)}.",
            'name one, e.g. "bf16", or pass the compressor itself; "" for none.',
        )
