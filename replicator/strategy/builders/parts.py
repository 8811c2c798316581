# SPDX-License-Identifier: Apache-2.0
"""How many parts a variable is in, and the node of one in parts."""

from __future__ import annotations

from collections.abc import Callable

from replicator.strategy.facts import VariableFacts
from replicator.strategy.nodes import Node, Synchronizer, even_sizes


def divisor(size: int) -> int:
    """Returns the smallest divisor of a size from 2 on; 1 for a size below 2."""
    if size < 2:
        return 1
    candidate = 2
    while candidate * candidate <= size:
        if size % candidate == 0:
            return candidate
        candidate += 1
    return size


def no_divisor(size: int) -> int:
    """Returns the smallest number from 2 on that does not divide a size, or the size.

    In so many parts it is not even, unless there are fewer elements than that.
    """
    if size < 2:
        return 1
    candidate = 2
    while size % candidate == 0:
        candidate += 1
    return min(candidate, size)


def node_in_parts(
    variable: VariableFacts,
    axis: int,
    count: int,
    synchronizer: Callable[[int], Synchronizer],
) -> Node:
    """Returns the node of a variable in parts, or of a whole one if that is one part.

    Args:
        variable: The variable.
        axis: Along which axis.
        count: How many parts; as even as can be, the larger ones first.
        synchronizer: Takes the bytes of a part, in order, and returns its synchronizer.
    """
    if count < 2:
        return Node(variable.path, synchronizer(variable.nbytes))
    size = variable.shape[axis]
    sizes = even_sizes(size, count)
    made = [synchronizer(variable.nbytes // size * own) for own in sizes]
    return Node.in_parts(variable.path, axis, sizes, made)
