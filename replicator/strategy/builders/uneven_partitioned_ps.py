# SPDX-License-Identifier: Apache-2.0
"""UnevenPartitionedPS: uneven parts of variables, spread over all CPU devices."""

from __future__ import annotations

from replicator.strategy.builders.partitioned_ps import PartitionedPS
from replicator.strategy.builders.parts import no_divisor


class UnevenPartitionedPS(PartitionedPS):
    """Like PartitionedPS, with a number of parts that does not divide the size.

    It is the smallest such number, from 2 on; two rows make two parts. Takes the
    arguments of `PS`.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (6, 2), "float32", nbytes=48)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> built = replicator.strategy.UnevenPartitionedPS().build([facts], devices)
        >>> built.node("w").sizes
        (2, 2, 1, 1)
    """

    def count(self, size: int) -> int:
        """Returns the number of parts for an axis of this size.

        Example:
            >>> [replicator.strategy.UnevenPartitionedPS().count(n) for n in (2, 6, 7)]
            [2, 4, 2]

        Args:
            size: The size of the axis.
        """
        return no_divisor(size)
