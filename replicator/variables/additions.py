# SPDX-License-Identifier: Apache-2.0
"""Tells assignments that add to a variable from all others.

Keras counts by `v.assign(v + 1)`, also in its method `assign_add`. What is added may be
summed over the replicas, and several programs that share a variable must add to it
atomically: additions by another one between the read and the write would be lost.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context
from replicator.graph.ir import captures, walk
from replicator.graph.passes.reads import Recent
from replicator.variables import agreement

_SUMS = ("AddV2", "Add")
# Ops that are linear in a variable's value, by the inputs through which they are.
_LINEAR = {
    **dict.fromkeys(("Cast", "Identity", "Neg", "RealDiv", "Reshape", "Sub"), slice(1)),
    **dict.fromkeys(("TensorScatterAdd", "TensorScatterSub"), slice(1)),
    **dict.fromkeys(("Add", "AddN", "AddV2", "Mul"), slice(None)),
    **dict.fromkeys(("Select", "SelectV2"), slice(1, None)),
}


def as_addition(variable: Any, method: str, value: Any) -> tuple[str, Any]:
    """Returns the method and value of an assignment, by "assign_add" if it must add.

    Args:
        variable: The ReplicatedVariable that is written.
        method: The method that writes it.
        value: What it writes.
    """
    if method != "assign":
        return method, value
    if variable.placement.shared or _sums(variable, context.current()):
        delta = addend(variable, value)
        if delta is not None:
            return "assign_add", delta
    return method, value


def _sums(variable: Any, replica: context.ReplicaContext | None) -> bool:
    """Whether what replicas assign is summed: of what is added, not of wholes.

    The value before is the same on all replicas, and would be added once for each.
    """
    if replica is None or agreement.is_equal(variable, replica):
        return False
    return bool(variable.aggregation == tf.VariableAggregation.SUM)


def addend(variable: Any, value: Any) -> tf.Tensor | None:
    """Returns what an assignment in a step adds to a variable, or None if it does not.

    Args:
        variable: The variable that is assigned to.
        value: The value that is assigned.
    """
    if not tf.is_symbolic_tensor(value) or value.op.type not in (*_SUMS, "Sub"):
        return None
    left, right = value.op.inputs
    if _is_read(variable, left):
        delta = tf.negative(right) if value.op.type == "Sub" else right
        return tf.broadcast_to(delta, tf.shape(left))
    if value.op.type in _SUMS and _is_read(variable, right):
        return tf.broadcast_to(left, tf.shape(right))
    return None


def keeps_sums(variable: Any, value: Any) -> bool:
    """Whether an assignment in a step keeps components whose sum is the whole's value.

    It does if it adds to a multiple of the variable's value, or assigns zeros.

    Args:
        variable: The variable that is assigned to.
        value: The value that is assigned.
    """
    value = tf.convert_to_tensor(value, variable.dtype)
    constant = tf.get_static_value(value)
    if constant is not None and not constant.any():
        return True

    def terms(ref: Any) -> list[Any]:
        op = ref.deref().op
        inputs = op.inputs[_LINEAR.get(op.type, slice(0))]
        return [x.ref() for x in inputs if tf.is_symbolic_tensor(x)]

    of = [value.ref()] if tf.is_symbolic_tensor(value) else []
    return any(_is_read(variable, ref.deref()) for ref in walk.upstream(of, terms))


def _is_read(variable: Any, tensor: tf.Tensor) -> bool:
    """Whether a tensor is the variable's value, as it is before the assignment."""
    replica = context.current()
    if (
        replica is not None
        and replica.states.of(Recent).value(variable.handle) is tensor
    ):
        return True
    if tensor.op.type != "ReadVariableOp":
        return False
    outermost = captures.Captures().outermost
    return outermost(tensor.op.inputs[0]) is outermost(variable.handle)
