# SPDX-License-Identifier: Apache-2.0
"""Takes away identities of resources, which are the same resource under another name.

A program may use a variable through `tf.identity(v.handle)`. All passes identify a
resource by its tensor: they order reads after writes, join repeated reads, and keep the
owner's writes. Runs before any of them, so that each resource is one tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir.kinds import SWITCHING


def see_through(ops: Iterable[tf.Operation]) -> None:
    """Points what uses an identity of a resource at the resource itself.

    What an identity waits for, its consumers wait for. Identities of what enters a
    branch or a loop of TensorFlow 1 are part of its control flow and left unchanged.

    Args:
        ops: The ops of all replicas, in build order.
    """
    for op in ops:
        if op.type != "Identity" or op.outputs[0].dtype != tf.resource:
            continue
        if op.inputs[0].op.type in SWITCHING:
            continue
        for consumer in op.outputs[0].consumers():
            _tf.add_control_inputs(consumer, op.control_inputs)
        _tf.replace(op.outputs[0], op.inputs[0])
        _tf.abandon([op])  # functions would take it for a write of the resource
