# SPDX-License-Identifier: Apache-2.0
"""Which values are the same on all replicas, by construction.

Value numbering: tensors get equal labels where they are computed alike from alike
values: constants, results that a collective hands to everybody, and stateless ops of
these. What the label says of two replicas' loop counters is that the loops make the
same number of turns, so that nothing needs to be compared when the step runs.

Source: value numbering is that of Cocke and Schwartz 1970, Programming languages and
their compilers, as compilers use it to find common subexpressions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import placeholder, switching
from replicator.graph.ir.kinds import kind_of

# Which of its inputs a Merge returns, the inputs do not say; see `determined_by`.
_NOT_PURE = ("Placeholder", "PlaceholderWithDefault", "PyFuncStateless", "Merge")


class Labels:
    """Labels tensors; equal labels mean equal values when the step runs.

    Args:
        flow: What is in control flow of TensorFlow 1.
    """

    def __init__(self, flow: switching.Flow = switching.NONE) -> None:
        self._flow = flow
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}  # by the id of a tensor

    def set(self, tensor: tf.Tensor, label: int) -> None:
        """Says what is known of a tensor, an argument of a function for example."""
        self._known[id(tensor)] = label

    def join(self, results: Sequence[Sequence[tf.Tensor]]) -> None:
        """Says that all replicas received the same, also where each has its own copy.

        Args:
            results: `results[n]` are what the n-th of them received.
        """
        for column in zip(*results, strict=True):
            if len(set(map(id, column))) > 1:
                label = self.new()
                for tensor in column:
                    self.set(tensor, label)

    def new(self) -> int:
        """Returns a label of its own."""
        return self._number(object())

    def of(self, tensor: tf.Tensor) -> int:
        """Returns the label of a tensor."""
        return self._label(tensor, self._known)

    def same(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether the tensors are equal by construction."""
        return len({self.of(tensor) for tensor in tensors}) == 1

    def of_loops(self, loops: Sequence[tf.Operation]) -> list[int | None]:
        """Returns a label for each loop variable that stays the same on all replicas.

        Args:
            loops: One loop per replica.

        Returns:
            By position; None where the variables may come to differ.
        """
        if len({len(op.inputs) for op in loops}) > 1:
            return [None] * max(len(op.inputs) for op in loops)
        bodies = [_tf.function_body(op, "body") for op in loops]
        labels: list[int | None] = [
            self._in_a_loop(column)
            for column in zip(*(op.inputs for op in loops), strict=True)
        ]
        while True:  # until what a turn starts with is what it ends with
            columns = zip(
                *(self._through(*body, labels) for body in bodies), strict=True
            )
            kept = [
                label if len(set(column)) == 1 else None
                for label, column in zip(labels, columns, strict=True)
            ]
            if kept == labels:
                return kept
            labels = kept

    def _in_a_loop(self, column: Sequence[tf.Tensor]) -> int | None:
        """Labels what a loop variable may come to be; a resource stays what it is."""
        if not self.same(column):
            return None
        return self.of(column[0]) if column[0].dtype == tf.resource else self.new()

    def _through(
        self, graph: Any, outputs: Sequence[tf.Tensor], labels: Sequence[int | None]
    ) -> list[int]:
        """Labels the results of a function, given labels of its arguments."""
        known = {
            id(tensor): self.new() if label is None else label
            for tensor, label in zip(graph.inputs, labels, strict=True)
        }
        return [self._label(tensor, known) for tensor in outputs]

    def _label(self, tensor: tf.Tensor, known: dict[int, int]) -> int:
        """Labels a tensor and all that it is computed from, without recursion."""
        stack = [tensor]
        while stack:
            top = stack[-1]
            if id(top) in known:
                stack.pop()
                continue
            key, inputs = self._origin(top)
            missing = [t for t in inputs if id(t) not in known]
            if missing:
                stack += missing
                continue
            used = tuple(known[id(t)] for t in inputs)
            known[id(top)] = self._number((key, used, top.value_index))
        return known[id(tensor)]

    def _origin(self, tensor: tf.Tensor) -> tuple[Hashable, Sequence[tf.Tensor]]:
        """Returns what makes a result of an op the same, and from which inputs."""
        op = tensor.op
        call = placeholder.read(op)
        if call is not None and tensor.value_index < call.same_for_all(len(op.outputs)):
            return (call.key, call.group), ()
        given = determined_by(op, self._flow)
        return (id(op), ()) if given is None else (description(op), given)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def determined_by(op: tf.Operation, flow: switching.Flow) -> Sequence[tf.Tensor] | None:
    """Returns the tensors on which alone the results of an op depend.

    Args:
        op: Any.
        flow: What is in control flow of TensorFlow 1, whose Merge ops return what
            they are given by the side that is taken.

    Returns:
        None if the results depend on more.
    """
    deciders = flow.deciders(op)
    if deciders is not None:
        return [*op.inputs, *deciders]
    return op.inputs if is_pure(op) else None


def is_pure(op: tf.Operation) -> bool:
    """Whether the results of an op depend on nothing but its inputs."""
    if op.type in _NOT_PURE:
        return False
    kind = kind_of(op)
    return not (kind.stateful or kind.calls)


def description(op: tf.Operation) -> Hashable:
    """Returns what an op does, and on what kind of device, but not where."""
    node = op.node_def
    attributes = sorted(
        (name, value.SerializeToString(deterministic=True))
        for name, value in node.attr.items()
        if not name.startswith("_")
    )
    return op.type, tf.DeviceSpec.from_string(op.device).device_type, tuple(attributes)
