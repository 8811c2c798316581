# SPDX-License-Identifier: Apache-2.0
"""Partitioned: splits variables along a chosen axis, for use in rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from replicator import arguments, errors
from replicator.strategy.builder import Builder
from replicator.strategy.builders.parts import node_in_parts
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.variables.default_placement import Loads
from replicator.variables.synchronizer import PSSynchronizer, error


class Partitioned(Builder):
    """Splits variables along an axis, each part on the replica with the fewest bytes.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (2, 5), "float32", nbytes=40)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> builder = replicator.strategy.Partitioned(axis=-1)
        >>> builder.build([facts], devices).node("w").sizes
        (3, 2)

    Args:
        axis: The axis; counted from the end if negative.
        parts: The number of parts; None: one per replica. At most one per element along
            the axis.

    Raises:
        StrategyError: An option has an invalid value.
    """

    def __init__(self, axis: int = 0, parts: int | None = None) -> None:
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise _wrong("axis", axis, "it is an int.")
        if parts is not None and not arguments.is_whole(parts, 1):
            raise _wrong("parts", parts, "it is an int, at least 1, or None.")
        self.axis = axis
        self.parts = parts

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes with parts on the replicas' devices; see `Builder.nodes`."""
        loads = Loads(resources.devices)
        for variable in variables:
            rank = len(variable.shape)
            if not -rank <= self.axis < rank:
                raise error(
                    f"variable {variable.path} is to be in parts along axis "
                    f"{self.axis}, and its shape is {list(variable.shape)}.",
                    "name an axis that it has, or give it another rule.",
                )
            axis = self.axis % rank
            count = min(self.parts or resources.num_replicas, variable.shape[axis])
            yield node_in_parts(
                *(variable, axis, count),
                lambda nbytes: PSSynchronizer(loads.least(nbytes)),
            )


def _wrong(name: str, value: Any, fix: str) -> errors.StrategyError:
    return error(f"Partitioned was given {name}={errors.repr_of(value)}.", fix)
