# SPDX-License-Identifier: Apache-2.0
"""Values that go from turn to turn of a loop, or through a branch, or are in a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator.autodist import flows, kinds
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import ENTERS, MERGES, NEXT

TESTS = frozenset({"Less", "LessEqual", "Greater", "GreaterEqual"})
_OFTESTS = ("LogicalAnd", "LogicalOr", "LogicalNot", "Identity", "LoopCond", "Squeeze")


def ordered(
    tensor: tf.Tensor, stops: Callable[[tf.Operation], bool], control: switching.Flow
) -> list[tf.Operation]:
    """Returns what a tensor depends on; what a loop passes on to its next turn last."""
    ordered: list[tf.Operation] = []
    seen: set[tf.Operation] = set()

    def goes(op: tf.Operation) -> Sequence[tf.Tensor]:
        if op.type not in MERGES:
            return list(op.inputs)
        own = [one for one in op.inputs if one.op.type not in NEXT]
        return [*own, *(control.deciders(op) or ())]

    waiting = [tensor]
    while waiting:
        found = flows.upstream(waiting, lambda op: op in seen or stops(op), goes)
        new = [op for op in found if op not in seen]
        ordered += new
        seen.update(new)
        turns = [t for op in new if op.type in MERGES for t in op.inputs]
        waiting = [t for t in turns if t.op.type in NEXT and t.op not in seen]
    return ordered


def tested(op: tf.Operation, values: Sequence[Value]) -> Value | None:
    """Returns what a comparison with an extremum is, which is true of any or of all."""
    one, two = values
    if op.type.startswith("Greater"):
        one, two = two, one
    if kinds.is_same(one) and two.kind in (Kind.MAX, Kind.MIN):
        return Value(two.kind)
    if kinds.is_same(two) and one.kind in (Kind.MAX, Kind.MIN):
        return kinds.negated(Value(one.kind))
    return None


def chosen(op: tf.Operation, value: Value, test: tf.Tensor) -> Value:
    """Returns what is chosen by a test that differs between replicas.

    Where it compares whole numbers, the lengths of sequences say, turns of a loop that
    a replica makes or does not are taken to leave its examples as they are.
    """
    if value.kind is not Kind.ROWS or not _is_of_numbers(test):
        return UNKNOWN
    return value.replaced(mixed=value.mixed or op)


def _is_of_numbers(test: tf.Tensor) -> bool:
    op = test.op
    if op.type in _OFTESTS:
        return all(_is_of_numbers(one) for one in op.inputs)
    return op.type in TESTS and op.inputs[0].dtype.is_integer


def in_turns(tensor: tf.Tensor, before: Value, after: Value) -> Value:
    """Returns what is passed from turn to turn of a loop."""
    if tensor.dtype == tf.variant and kinds.is_same(before):
        return after  # a list that was empty
    return kinds.joined(before, after)


def is_list(merge: tf.Operation) -> bool:
    """Whether a loop of TensorFlow 1 passes on the flow of a TensorArray."""
    for tensor in merge.inputs:
        op = tensor.op
        if op.type in ENTERS and op.inputs[0].op.type.startswith("TensorArray"):
            return True
    return False


def of_list(op: tf.Operation, values: Sequence[Value]) -> Value:
    """Returns what is in a list of tensors: each element is of one kind."""
    made = op.type.removeprefix("TensorList").removeprefix("TensorArray")
    made = made.removesuffix("V3")
    if made in ("Reserve", "Length", "Size", "V3", ""):
        return SAME
    if made in ("SetItem", "PushBack", "Write"):
        value = values[-1] if made != "Write" else values[2]
        before = values[0] if made != "Write" else values[3]
        return value if kinds.is_same(before) else kinds.joined(before, value)
    if made in ("GetItem", "PopBack"):
        return values[0]
    if made == "Read":
        return values[2]
    if made in ("FromTensor", "Scatter"):
        value = values[0] if made == "FromTensor" else values[2]
        if value.kind is Kind.ROWS:
            return value.replaced(axis=value.axis - 1) if value.axis else UNKNOWN
        return value if kinds.is_same(value) else UNKNOWN
    if made in ("Stack", "Gather"):
        value = values[0] if op.type.startswith("TensorList") else values[2]
        return value.replaced(axis=value.axis + 1)
    return UNKNOWN
