# SPDX-License-Identifier: Apache-2.0
"""Sums in which zeros are left out, where the graph shows that they are zeros.

The gradient of a variable that a replica does not use is zeros there: where each
replica has a stage of a network, or a part of each layer, all gradients but one are.
Zeros that are left out are not sent, and what is left is combined in replica order, to
the bits of the hub, but for the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from replicator.costs import hosts
from replicator.graph.ir import shapes
from replicator.graph.lowering.matched import Matched
from replicator.primitives import reductions

_SMALL = 1000  # elements, up to which tf.zeros makes a constant


def reduce(
    matched: Matched, columns: Sequence[Sequence[tf.Tensor]], among: Iterable[int]
) -> dict[int, list[tf.Tensor]]:
    """Reduces, by sum or mean, the operands of which all but a few are zeros.

    Args:
        matched: The communication.
        columns: `columns[k][n]` is the k-th operand of participant n.
        among: Which of them are to be reduced.

    Returns:
        By k, what each participant receives. What is left out is to be reduced as it
        is: what has no zeros, what an algorithm was named for, and what is better
        combined in several places, since all replicas need it or hosts have several.
    """
    if matched.crossing is not None:  # what other processes have is not known here
        return {}
    made = {}
    for k in among:
        column = columns[k]
        left = [n for n, x in enumerate(column) if not is_zeros(x)]
        if len(left) in (0, len(column)) or matched.algorithm(k) is not None:
            continue
        if len({shapes.static(x) for x in column}) > 1:
            continue  # which is an error when it runs
        if (at := _place(matched, k, left)) is not None:
            made[k] = _combined(matched, column, left, at)
    if made:
        matched.notes.algorithms.append("zeros left out")
    return made


def _place(matched: Matched, k: int, left: Sequence[int]) -> str | None:
    """Returns the device on which to combine what is left; None: do not."""
    owner = matched.owner(k)
    in_levels = hosts.in_levels(matched.devices)
    if owner is not None and not (in_levels and len(left) > 1):
        return matched.devices[matched.group.index(owner)]
    if owner is None and not in_levels and len(left) == 1:
        return matched.devices[left[0]]
    return None


def _combined(
    matched: Matched, column: Sequence[tf.Tensor], left: Sequence[int], at: str
) -> list[tf.Tensor]:
    """Returns what participants receive of a column of which some are left."""
    op = matched.options["op"]
    steps = reductions.steps_of(op, column[0].dtype, len(column))
    with tf.device(at):
        own = [column[n] for n in left]
        (result,) = reductions.combine(op, own, matched.group, steps)
    return [result for _ in column]


def is_zeros(x: tf.Tensor) -> bool:
    """Whether a tensor is zeros, by the op that makes it, and of a known shape."""
    op = x.op
    while op.type == "Identity":
        op = op.inputs[0].op
    if not x.shape.is_fully_defined():
        return False
    if op.type == "ZerosLike":
        return True
    if op.type == "Fill":
        value = tf.get_static_value(op.inputs[1])
    elif op.type == "Const" and x.shape.num_elements() <= _SMALL:
        value = tf.get_static_value(op.outputs[0])
    else:
        return False
    return value is not None and not np.any(value)
