# SPDX-License-Identifier: Apache-2.0
"""UnevenPartitionedPS: parts of variables that are not alike, on all CPU devices."""

from __future__ import annotations

from replicator.strategy.builders.partitioned_ps import PartitionedPS
from replicator.strategy.builders.parts import no_divisor


class UnevenPartitionedPS(PartitionedPS):
    """As PartitionedPS, in a number of parts that does not divide the size.

    In as many as the smallest such number from 2 on; what has two rows is in two. Takes
    what `PS` takes.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (6, 2), "float32", nbytes=48)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> built = replicator.strategy.UnevenPartitionedPS().build([facts], devices)
        >>> built.node("w").sizes
        (2, 2, 1, 1)
    """

    def count(self, size: int) -> int:
        """Returns in how many parts an axis is.

        Example:
            >>> [replicator.strategy.UnevenPartitionedPS().count(n) for n in (2, 6, 7)]
            [2, 4, 2]
        """
        return no_divisor(size)
