# SPDX-License-Identifier: Apache-2.0
"""Removes other names of resources, so that each resource is one tensor.

A program may use a variable through `tf.identity(v.handle)`, and `tf.gradients` asks
for the shape of a variable that a loop used through the loop's output. The passes that
order reads after writes, merge repeated reads and keep the owner's writes recognize a
resource by its tensor. This one runs before them.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from replicator._tf import ops as tf_ops

_LOOPS = ("While", "StatelessWhile")


def see_through(ops: Iterable[tf.Operation]) -> None:
    """Points the consumers of a resource's identity at the resource itself.

    They also wait for the identity's control inputs.

    Args:
        ops: The ops of all replicas, in build order.
    """
    for op in ops:
        if op.type in _LOOPS:
            _see_through_loop(op)
        if not _is_removed(op):
            continue
        for consumer in op.outputs[0].consumers():
            tf_ops.add_control_inputs(consumer, op.control_inputs)
        tf_ops.replace(op.outputs[0], op.inputs[0])
        tf_ops.abandon([op])  # functions would take it for a write of the resource


def _see_through_loop(loop: tf.Operation) -> None:
    """Makes ops that read the shapes of a loop's resources read the resources instead.

    A session places such an op with the loop, but runs it on the device of the
    resource, which is another one where the replica is not the owner. A resource that a
    function captures is on no device.
    """
    for n, output in enumerate(loop.outputs):
        if output.dtype != tf.resource or loop.inputs[n].op.type == "Placeholder":
            continue
        for consumer in output.consumers():
            if consumer.type == "VariableShape":
                tf_ops.set_input(consumer, 0, loop.inputs[n])
                tf_ops.move_to_device(consumer, loop.inputs[n].device)


def seen_through(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the resource itself for an identity of it, which is going to be removed.

    Args:
        tensor: Any tensor; others are returned unchanged.
    """
    while _is_removed(tensor.op):
        tensor = tensor.op.inputs[0]
    return tensor


def _is_removed(op: tf.Operation) -> bool:
    """Whether an op is an identity of a resource."""
    return op.type == "Identity" and op.outputs[0].dtype == tf.resource
