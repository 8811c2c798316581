# SPDX-License-Identifier: Apache-2.0
"""Rules for values passed between loop iterations, through branches or in lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator.autodist import flows, kinds, lengths
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import ENTERS, MERGES, NEXT


def ordered(
    tensor: tf.Tensor, stops: Callable[[tf.Operation], bool], control: switching.Flow
) -> list[tf.Operation]:
    """Returns the ops a tensor depends on; those for the next iteration come last."""
    ordered: list[tf.Operation] = []
    seen: set[tf.Operation] = set()

    def goes(op: tf.Operation) -> Sequence[tf.Tensor]:
        if op.type not in MERGES:
            return list(op.inputs)
        entering = [operand for operand in op.inputs if operand.op.type not in NEXT]
        return [*entering, *(control.deciders(op) or ())]

    pending = [tensor]
    while pending:
        upstream = flows.upstream(pending, lambda op: op in seen or stops(op), goes)
        new_ops = [op for op in upstream if op not in seen]
        ordered += new_ops
        seen.update(new_ops)
        operands = [t for op in new_ops if op.type in MERGES for t in op.inputs]
        pending = [t for t in operands if t.op.type in NEXT and t.op not in seen]
    return ordered


def ended(value: Value, found: tuple[lengths.Loop, int] | None) -> Value:
    """Returns the final Value of a loop variable when numbers of iterations differ.

    Args:
        value: The variable's Value after each iteration.
        found: The loop and the variable's number; None if unknown.
    """
    if found is None:
        return UNKNOWN
    loop, k = found
    keeps_rows = value.kind is Kind.ROWS and loop.keeps(k)
    return value if keeps_rows or loop.is_constant(k) else UNKNOWN


def in_turns(before: Value, after: Value, is_list: bool) -> Value:
    """Returns the Value of a loop variable over all iterations."""
    if is_list and kinds.is_same(before):
        return after  # the list was empty
    return kinds.joined(before, after)


def is_list(merge: tf.Operation) -> bool:
    """Whether a TensorFlow 1 loop passes on the flow of a TensorArray at a Merge."""
    for tensor in merge.inputs:
        op = tensor.op
        if op.type in ENTERS and op.inputs[0].op.type.startswith("TensorArray"):
            return True
    return False


def of_list(op: tf.Operation, values: Sequence[Value]) -> Value:
    """Returns the Value of a list op's result; elements of a list share one Value."""
    operation = op.type.removeprefix("TensorList").removeprefix("TensorArray")
    operation = operation.removesuffix("V3")
    if operation in ("Reserve", "Length", "Size", "V3", ""):
        return SAME
    if operation in ("SetItem", "PushBack", "Write"):
        value = values[-1] if operation != "Write" else values[2]
        before = values[0] if operation != "Write" else values[3]
        return value if kinds.is_same(before) else kinds.joined(before, value)
    if operation in ("GetItem", "PopBack"):
        return values[0]
    if operation == "Read":
        return values[2]
    if operation in ("FromTensor", "Scatter"):
        value = values[0] if operation == "FromTensor" else values[2]
        if value.kind is Kind.ROWS:
            return value.replaced(axis=value.axis - 1) if value.axis else UNKNOWN
        return value if kinds.is_same(value) else UNKNOWN
    if operation in ("Stack", "Gather"):
        value = values[0] if op.type.startswith("TensorList") else values[2]
        return value.replaced(axis=value.axis + 1)
    return UNKNOWN
