# SPDX-License-Identifier: Apache-2.0
"""Tells assignments that add to a variable from all others.

Keras counts by `v.assign(v + 1)`, also in its method `assign_add`. What is added may be
summed over the replicas, and several programs that share a variable must add to it
atomically: additions by another one between the read and the write would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator._tf import tapes
from replicator.graph.ir import captures, walk
from replicator.graph.order.effects import may_write
from replicator.graph.passes.reads import Recent
from replicator.primitives import base
from replicator.variables import agreement

_SUMS = ("AddV2", "Add")
# Ops that are linear in a variable's value, by the inputs through which they are.
_ALL = slice(None)
_LINEAR = {
    **dict.fromkeys(("Cast", "Identity", "Neg", "RealDiv", "Reshape", "Sub"), slice(1)),
    **dict.fromkeys(("TensorScatterAdd", "TensorScatterSub"), slice(1)),
    **dict.fromkeys(("Add", "AddN", "AddV2", "Mul"), _ALL),
    **dict.fromkeys(("Select", "SelectV2"), slice(1, None)),
}
# Ops that make a whole of a variable's value, which may be in parts.
_WHOLE = {
    **_LINEAR,
    **dict.fromkeys(("ConcatV2", "IdentityN", "Maximum", "Minimum"), _ALL),
    **dict.fromkeys(("Slice", "SplitV", "StridedSlice"), slice(1)),
}


def as_addition(variable: Any, method: str, value: Any) -> tuple[str, Any]:
    """Returns the method and value of an assignment, by "assign_add" if it must add.

    Args:
        variable: The variable that is written: a ReplicatedVariable, or one in parts.
        method: The method that writes it.
        value: What it writes.

    Raises:
        ArgumentError: The replicas would sum what they cannot: values of the whole.
    """
    if method != "assign":
        return method, value
    replica = context.current()
    sums = _sums(variable, replica)
    if variable.placement.shared or sums:
        delta = addend(variable, value)
        if delta is not None:
            return "assign_add", delta
    is_update = replica is not None and replica.mode.updating  # which is averaged
    if sums and not is_update and _is_of(variable, value, _WHOLE):
        raise base.bad_argument(
            f"assign of variable {variable.name}, whose aggregation is SUM,",
            "was given a value that is computed from the variable's own: each "
            "replica's whole would be added to the others'",
            "use assign_add, of which the variable gets the sum; or create the "
            "variable without an aggregation, and assign what is equal on all "
            'replicas, such as 0.9 * v + repl.all_reduce(x, "sum").',
        )
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
    if _is_current(variable, left):
        delta = tf.negative(right) if value.op.type == "Sub" else right
        return tf.broadcast_to(delta, tf.shape(left))
    if value.op.type in _SUMS and _is_current(variable, right):
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
    return _is_of(variable, value, _LINEAR)


def _is_of(variable: Any, value: Any, ops: Mapping[str, slice]) -> bool:
    """Whether a value is made of the variable's, by ops and through inputs of these."""
    outermost = captures.Captures().outermost  # of what is around a branch, too

    def refs(tensors: Sequence[Any]) -> list[Any]:
        return [x.ref() for x in map(outermost, tensors) if tf.is_symbolic_tensor(x)]

    def terms(ref: Any) -> list[Any]:
        op = ref.deref().op
        return refs(op.inputs[ops.get(op.type, slice(0))])

    found = walk.upstream(refs([value]), terms)
    return any(_is_read(variable, ref.deref()) for ref in found)


def _is_current(variable: Any, tensor: tf.Tensor) -> bool:
    """Whether a tensor is the variable's value, as it is before the assignment."""
    passing = ("Identity", "IdentityN")  # the latter ties a value in parts to a whole
    while tensor.op.type in passing and not _is_recent(variable, tensor):
        tensor = tensor.op.inputs[0]
    if hasattr(variable, "parts"):
        pieces = list(tensor.op.inputs)[:-1] if tensor.op.type == "ConcatV2" else []
        pieces = pieces or [tensor]
        is_all = len(pieces) == len(variable.parts)
        return is_all and all(map(_is_current, variable.parts, pieces))
    if not _is_read(variable, tensor):
        return False
    return _is_recent(variable, tensor) or not any(
        may_write(op) and tapes.number_of(op) > tapes.number_of(tensor.op)
        for op in tensor.op.inputs[0].consumers()
    )


def _is_read(variable: Any, tensor: tf.Tensor) -> bool:
    """Whether a tensor is a value that the variable, or a part, has or had before."""
    if hasattr(variable, "parts"):
        return any(_is_read(part, tensor) for part in variable.parts)
    if _is_recent(variable, tensor):
        return True
    if tensor.op.type != "ReadVariableOp":
        return False
    outermost = captures.Captures().outermost
    return outermost(tensor.op.inputs[0]) is outermost(variable.handle)


def _is_recent(variable: Any, tensor: tf.Tensor) -> bool:
    """Whether a tensor is the value that a read in a step would return now."""
    replica = context.current()
    if replica is None:
        return False
    return replica.states.of(Recent).value(variable.handle) is tensor
