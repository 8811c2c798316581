# SPDX-License-Identifier: Apache-2.0
"""Finds the ops that compute only what removed writes would have written.

Of all writes to a variable that one replica owns, only the owner's remains (see
passes/owners.py). What only the others would have read is pruned: a reduced gradient,
for instance, is not sent to replicas that do not apply it.
"""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.graph.ir.kinds import has_effect


def ops(removed: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns removed ops, and those whose values only they would use.

    Args:
        removed: Ops that will not run, on one level of the graph.
    """
    unread = set(removed)
    stack = list(unread)
    while stack:
        for tensor in stack.pop().inputs:
            op = tensor.op
            if op not in unread and _is_for(op, unread):
                unread.add(op)
                stack.append(op)
    return unread


def _is_for(op: tf.Operation, others: set[tf.Operation]) -> bool:
    """Whether the only effect of an op is to be read by others."""
    readers = (reader for tensor in op.outputs for reader in tensor.consumers())
    return (
        others.issuperset(readers)
        and others.issuperset(tf_ops.control_outputs(op))
        and not has_effect(op)
    )
