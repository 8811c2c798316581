# SPDX-License-Identifier: Apache-2.0
"""Chooses the number of a variable's parts, and creates nodes with parts."""

from __future__ import annotations

from collections.abc import Callable

from replicator.strategy.facts import VariableFacts
from replicator.strategy.nodes import Node, even_sizes
from replicator.variables.synchronizer import Synchronizer


def divisor(size: int) -> int:
    """Returns the smallest divisor of a size, from 2 on; 1 for a size below 2."""
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

    That many parts are uneven, unless there are fewer elements than that.
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
    """Returns the node of a variable in parts, or a whole node for a single part.

    Args:
        variable: The variable.
        axis: The axis to split.
        count: The number of parts; as even as possible, the larger ones first.
        synchronizer: Takes the bytes of a part, in order, and returns its synchronizer.
    """
    if count < 2:
        return Node(variable.path, synchronizer(variable.nbytes))
    size = variable.shape[axis]
    sizes = even_sizes(size, count)
    synchronizers = [synchronizer(variable.nbytes // size * extent) for extent in sizes]
    return Node.in_parts(variable.path, axis, sizes, synchronizers)
