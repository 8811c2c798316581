# SPDX-License-Identifier: Apache-2.0
"""PartitionedPS: even parts of variables on all CPU devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from replicator.strategy.builders.loads import Loads
from replicator.strategy.builders.parts import divisor, node_in_parts
from replicator.strategy.builders.ps import PS
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node


class PartitionedPS(PS):
    """Variables are in parts along axis 0, each on the CPU device with fewest bytes.

    In as many as the smallest divisor of their size from 2 on; scalars and what has one
    row are whole. Takes what `PS` takes.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (6, 2), "float32", nbytes=48)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> built = replicator.strategy.PartitionedPS().build([facts], devices)
        >>> built.node("w").sizes
        (3, 3)
    """

    def count(self, size: int) -> int:
        """Returns in how many parts an axis is.

        Example:
            >>> [replicator.strategy.PartitionedPS().count(n) for n in (1, 6, 7)]
            [1, 2, 7]
        """
        return divisor(size)

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes with parts on the least loaded devices; see `Builder.nodes`."""
        loads = Loads(resources.cpus)
        for variable in variables:
            count = self.count(variable.shape[0]) if variable.shape else 1
            yield node_in_parts(
                variable, 0, count, lambda nbytes: self.on(loads.least(nbytes))
            )
