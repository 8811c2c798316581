# SPDX-License-Identifier: Apache-2.0
"""PartitionedAR: even parts of variables, each mirrored on all replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from replicator.strategy.builders.all_reduce import AllReduce
from replicator.strategy.builders.parts import divisor, node_in_parts
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node


class PartitionedAR(AllReduce):
    """Splits variables along axis 0 like PartitionedPS; each part is all-reduced.

    Takes the arguments of `AllReduce`; a chunk counts parts.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (6, 2), "float32", nbytes=48)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> builder = replicator.strategy.PartitionedAR(chunk_size=1)
        >>> parts = builder.build([facts], devices).node("w").parts
        >>> [part.synchronizer.group for part in parts]
        [0, 1]
    """

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes with parts; see `Builder.nodes`."""
        index, cut = itertools.count(), self.cutter()
        for variable in variables:
            axis, count = cut(variable)
            yield node_in_parts(variable, axis, count, lambda _: self.of(next(index)))

    def cutter(self) -> Callable[[VariableFacts], tuple[int, int]]:
        """Returns a function that picks a variable's axis and number of parts.

        Example:
            >>> facts = replicator.strategy.VariableFacts("w", (9, 2), "float32")
            >>> replicator.strategy.PartitionedAR().cutter()(facts)
            (0, 3)
        """

        def cut(variable: VariableFacts) -> tuple[int, int]:
            return 0, divisor(variable.shape[0]) if variable.shape else 1

        return cut
