# SPDX-License-Identifier: Apache-2.0
"""PartitionedPS: even parts of variables, spread over all CPU devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from replicator.strategy.builders.parts import divisor, node_in_parts
from replicator.strategy.builders.ps import PS
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node
from replicator.variables.default_placement import Loads


class PartitionedPS(PS):
    """Splits variables along axis 0, each part on the CPU device with the fewest bytes.

    The number of parts is the smallest divisor of the size, from 2 on; scalars and
    variables with one row stay whole. Takes the arguments of `PS`.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (6, 2), "float32", nbytes=48)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> built = replicator.strategy.PartitionedPS().build([facts], devices)
        >>> built.node("w").sizes
        (3, 3)
    """

    def count(self, size: int) -> int:
        """Returns the number of parts for an axis of this size.

        Example:
            >>> [replicator.strategy.PartitionedPS().count(n) for n in (1, 6, 7)]
            [1, 2, 7]

        Args:
            size: The size of the axis.
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
