# SPDX-License-Identifier: Apache-2.0
"""Parts of a variable that several replicas read are joined once for all of them.

Each replica joins what it reads of a variable in parts. Once their reads are shared
(reads.py), replicas whose devices share memory join the same: one of them does so, and
the others are handed what it has joined, which is not copied. So a variable in parts is
copied once in a step, however many replicas there are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import switching


def share(
    replicas: Sequence[Sequence[tf.Operation]],
    near: Sequence[Sequence[int]],
    initializers: Set[tf.Operation],
    flow: switching.Flow = switching.NONE,
) -> int:
    """Lets one join of what was read serve all replicas that share memory.

    Args:
        replicas: `replicas[n]` are the ops of a replica's sub-graph, in build order.
        near: The places of those replicas that share memory.
        initializers: Ops that initialise variables, which are no part of the step.
        flow: What is in control flow of TensorFlow 1, and is left as it is.

    Returns:
        The number of joins that have lost their consumers.
    """
    joined = 0
    for group in near:
        values: dict[Hashable, tf.Tensor] = {}
        for op in (op for n in group for op in replicas[n]):
            if op.type != "ConcatV2" or op in initializers or op in flow:
                continue
            key = _what(op)
            if key is None:
                continue
            known = values.setdefault(key, op.outputs[0])
            if known is not op.outputs[0]:
                _tf.replace(op.outputs[0], known)
                joined += 1
    return joined


def _what(op: tf.Operation) -> Hashable | None:
    """Returns what an op joins, and how; None if not all of that was just read.

    Or if it waits for something: if one of its inputs does, TensorFlow lets only that.
    """
    *tensors, axis = op.inputs
    reads = [_read_of(tensor) for tensor in tensors]
    along = tf.get_static_value(axis)
    if along is None or None in reads or op.control_inputs or axis.op.control_inputs:
        return None
    return tuple(reads), int(along)


def _read_of(tensor: tf.Tensor) -> int | None:
    """Returns the id of what a read returned that a tensor is, or None."""
    while tensor.op.type == "Identity" and not tensor.op.control_inputs:
        tensor = tensor.op.inputs[0]
    return id(tensor) if tensor.op.type == "ReadVariableOp" else None
