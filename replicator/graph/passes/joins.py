# SPDX-License-Identifier: Apache-2.0
"""Joins the parts of a variable once for all replicas that read them.

Each replica joins the parts of a partitioned variable that it reads. Once their reads
are shared (reads.py), replicas whose devices share memory join the same values: one of
them does so, and the others use its result, which is not copied. So a partitioned
variable is copied once per step, however many replicas there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set

import tensorflow as tf

from replicator._tf import ops


def share(
    replicas: Sequence[Sequence[tf.Operation]],
    near: Sequence[Sequence[int]],
    initializers: Set[tf.Operation],
) -> int:
    """Lets replicas that share memory use one join of the same reads.

    Args:
        replicas: `replicas[n]` are the ops of a replica's sub-graph, in build order.
        near: The positions of replicas that share memory, in groups.
        initializers: Ops that initialize variables, which are not part of the step.

    Returns:
        The number of joins that have lost their consumers.
    """
    joined = 0
    for group in near:
        values: dict[Hashable, tf.Tensor] = {}
        for op in (op for n in group for op in replicas[n]):
            if op.type != "ConcatV2" or op in initializers:
                continue
            key = _join_key(op)
            if key is None:
                continue
            shared_value = values.setdefault(key, op.outputs[0])
            if shared_value is not op.outputs[0]:
                ops.replace(op.outputs[0], shared_value)
                joined += 1
    return joined


def _join_key(op: tf.Operation) -> Hashable | None:
    """Returns a key of the values that an op joins; None if any is not just read.

    Also None if it waits for other ops. The axis is checked, too: TensorFlow adds no
    control input to an op whose input has it already.
    """
    *tensors, axis = op.inputs
    reads = [_read_of(tensor) for tensor in tensors]
    along = tf.get_static_value(axis)
    if along is None or None in reads or op.control_inputs or axis.op.control_inputs:
        return None
    return tuple(reads), int(along)


def _read_of(tensor: tf.Tensor) -> int | None:
    """Returns the id of the value of a read that a tensor passes on, or None."""
    while tensor.op.type == "Identity" and not tensor.op.control_inputs:
        tensor = tensor.op.inputs[0]
    return id(tensor) if tensor.op.type == "ReadVariableOp" else None
