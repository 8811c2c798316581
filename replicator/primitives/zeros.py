# SPDX-License-Identifier: Apache-2.0
"""Sums that skip operands the graph shows to be zeros.

A variable that a replica does not use has a gradient of zeros there: where each replica
holds a stage of a network, or a part of each layer, all of its gradients but one are.
Zeros are skipped, so they are not sent. The others are combined in replica order, to
the same bits as the hub's result except for the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import tensorflow as tf

from replicator.costs import hosts
from replicator.graph.ir import shapes
from replicator.graph.lowering.matched import Matched
from replicator.primitives import reductions

_SMALL = 1000  # the most elements for which tf.zeros makes a constant


def reduce(
    matched: Matched, columns: Sequence[Sequence[tf.Tensor]], candidates: Iterable[int]
) -> dict[int, list[tf.Tensor]]:
    """Reduces, by sum or mean, the operands that are zeros on most replicas.

    Args:
        matched: The communication.
        columns: `columns[k][n]` is the k-th operand of participant n.
        candidates: The operands to consider, by k.

    Returns:
        By k, what each participant receives. Operands left out must be reduced as
        usual: those without zeros, those with a named algorithm, and those better
        combined in several places because all replicas need them or hosts have several
        replicas.
    """
    if matched.crossing is not None:  # other processes' operands are not known here
        return {}
    results = {}
    for k in candidates:
        column = columns[k]
        nonzero = [n for n, x in enumerate(column) if not is_zeros(x)]
        if len(nonzero) in (0, len(column)) or matched.algorithm(k) is not None:
            continue
        if len({shapes.static(x) for x in column}) > 1:
            continue  # an error at run time
        if (at := _place(matched, k, nonzero)) is not None:
            results[k] = _combined(matched, column, nonzero, at)
    if results:
        matched.notes.algorithms.append("zeros left out")
    return results


def _place(matched: Matched, k: int, nonzero: Sequence[int]) -> str | None:
    """Returns the device on which to combine the nonzero operands; None: do not."""
    owner = matched.owner(k)
    in_levels = hosts.in_levels(matched.devices)
    if owner is not None and not (in_levels and len(nonzero) > 1):
        return matched.devices[matched.group.index(owner)]
    if owner is None and not in_levels and len(nonzero) == 1:
        return matched.devices[nonzero[0]]
    return None


def _combined(
    matched: Matched, column: Sequence[tf.Tensor], nonzero: Sequence[int], at: str
) -> list[tf.Tensor]:
    """Combines the nonzero tensors of a column; returns one result per participant."""
    op = matched.options["op"]
    steps = reductions.steps_of(op, column[0].dtype, len(column))
    with tf.device(at):
        tensors = [column[n] for n in nonzero]
        (result,) = reductions.combine(op, tensors, matched.group, steps)
    return [result for _ in column]


def is_zeros(x: tf.Tensor) -> bool:
    """Whether a tensor has a static shape and is made by an op that yields zeros."""
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
