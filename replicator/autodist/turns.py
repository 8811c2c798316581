# SPDX-License-Identifier: Apache-2.0
"""Values that go from turn to turn of a loop, or through a branch, or are in a list."""

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


def ended(value: Value, found: tuple[lengths.Loop, int] | None) -> Value:
    """Returns what a loop ends with of which replicas make different numbers of turns.

    Args:
        value: What its variable is after each turn.
        found: The loop, and which variable it is; None if that is not known.
    """
    if found is None:
        return UNKNOWN
    loop, k = found
    rows = value.kind is Kind.ROWS and loop.keeps(k)
    return value if rows or loop.is_constant(k) else UNKNOWN


def in_turns(before: Value, after: Value, is_list: bool) -> Value:
    """Returns what is passed from turn to turn of a loop."""
    if is_list and kinds.is_same(before):
        return after  # it was empty
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
