# SPDX-License-Identifier: Apache-2.0
"""Value numbering: finds values that are the same on all replicas by construction.

Tensors get equal labels if they are computed in the same way from values with equal
labels: constants, results that a collective returns to all replicas, and stateless ops
of these. If two replicas' loop counters have equal labels, their loops make the same
number of turns, and nothing needs to be compared at run time.

Source: value numbering is due to Cocke and Schwartz 1970, Programming languages and
their compilers; compilers use it to find common subexpressions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import functions
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of

# The inputs of a Merge, which functions that were imported may hold, do not determine
# which of them it returns.
_NOT_PURE = ("Placeholder", "PlaceholderWithDefault", "PyFuncStateless", "Merge")


class Labels:
    """Labels tensors; equal labels mean equal values at run time."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[int, int] = {}  # by the id of a tensor

    def set(self, tensor: tf.Tensor, label: int) -> None:
        """Sets the label of a tensor, such as an argument of a function."""
        self._known[id(tensor)] = label

    def join(self, results: Sequence[Sequence[tf.Tensor]]) -> None:
        """Gives the replicas' copies of each result the same label.

        Args:
            results: `results[n]` are the results of the n-th replica, equal to the
                others'.
        """
        for column in zip(*results, strict=True):
            if len(set(map(id, column))) > 1:
                label = self.new()
                for tensor in column:
                    self.set(tensor, label)

    def new(self) -> int:
        """Returns a label that no tensor has yet."""
        return self._number(object())

    def of(self, tensor: tf.Tensor) -> int:
        """Returns the label of a tensor."""
        return self._label(tensor, self._known)

    def same(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Whether the tensors are equal by construction."""
        return len({self.of(tensor) for tensor in tensors}) == 1

    def of_loops(self, loops: Sequence[tf.Operation]) -> list[int | None]:
        """Returns labels of the loop variables that stay equal on all replicas.

        Args:
            loops: One loop per replica.

        Returns:
            By position; None where the variables may come to differ.
        """
        if len({len(op.inputs) for op in loops}) > 1:
            return [None] * max(len(op.inputs) for op in loops)
        bodies = [functions.function_body(op, "body") for op in loops]
        labels: list[int | None] = [
            self._in_a_loop(column)
            for column in zip(*(op.inputs for op in loops), strict=True)
        ]
        while True:  # until a turn preserves all labels
            columns = zip(
                *(self._through(*body, labels) for body in bodies), strict=True
            )
            preserved = [
                label if len(set(column)) == 1 else None
                for label, column in zip(labels, columns, strict=True)
            ]
            if preserved == labels:
                return preserved
            labels = preserved

    def _in_a_loop(self, column: Sequence[tf.Tensor]) -> int | None:
        """Labels a loop variable by its initial values, if these are equal.

        It gets a new label, as its value changes; a resource keeps its own.
        """
        if not self.same(column):
            return None
        return self.of(column[0]) if column[0].dtype == tf.resource else self.new()

    def _through(
        self, graph: Any, outputs: Sequence[tf.Tensor], labels: Sequence[int | None]
    ) -> list[int]:
        """Returns the labels of a function's results, given labels of its arguments."""
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
            input_labels = tuple(known[id(t)] for t in inputs)
            known[id(top)] = self._number((key, input_labels, top.value_index))
        return known[id(tensor)]

    def _origin(self, tensor: tf.Tensor) -> tuple[Hashable, Sequence[tf.Tensor]]:
        """Returns what identifies an op's results, and the inputs they depend on."""
        op = tensor.op
        call = placeholder.read(op)
        if call is not None and tensor.value_index < call.same_for_all(len(op.outputs)):
            return (call.key, call.group), ()
        return (description(op), op.inputs) if is_pure(op) else (id(op), ())

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def is_pure(op: tf.Operation) -> bool:
    """Whether an op's results depend on nothing but its inputs."""
    if op.type in _NOT_PURE:
        return False
    kind = kind_of(op)
    return not (kind.stateful or kind.calls)


def description(op: tf.Operation) -> Hashable:
    """Describes what an op does, and on what type of device, but not on which."""
    node = op.node_def
    attributes = sorted(
        (name, value.SerializeToString(deterministic=True))
        for name, value in node.attr.items()
        if not name.startswith("_")
    )
    return op.type, tf.DeviceSpec.from_string(op.device).device_type, tuple(attributes)
