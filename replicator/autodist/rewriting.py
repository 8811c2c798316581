# SPDX-License-Identifier: Apache-2.0
"""Copies a graph, or the body of a function, with some of its variables partitioned.

Most ops are copied unchanged, in a single import. Those that use a partitioned variable
are replaced by the rules in part_ops.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import stamping, uses
from replicator.autodist.cuts import Cut
from replicator.autodist.pieces import Pieces
from replicator.autodist.stamping import Places

# Returns the replacement of an op, or None if it has registered the results itself.
Divide = Callable[["Rewriter", tf.Operation], tf.Operation | None]


# No op may have the name of a scope that others are in already.
_PARTS = "AutoDist-parts/"  # scope of the ops that use parts
_LATER = "AutoDist-later/"  # scope of the stubs of tensors that are yet to come


@dataclasses.dataclass(frozen=True)
class Handles:
    """The handles of the parts that replace a variable's handle.

    Attributes:
        cut: How the variable is partitioned.
        parts: The handles of the parts.
        pivot: In control flow of TensorFlow 1, the op that new ops without inputs wait
            for, so that they run only when the others of their branch or loop do.
    """

    cut: Cut
    parts: tuple[tf.Tensor, ...]
    pivot: tf.Operation | None = None


class Rewriter:
    """Copies ops of one graph into another, with variables partitioned.

    Args:
        source: The graph of the ops.
        target: The graph of the copies.
        divide: Replaces an op that uses a partitioned variable.

    Attributes:
        places: Maps ops to their copies or replacements.
        handles: The replacements of handles, by the handle's id.
        pieces: The pieces of tensors that belong to parts.
        values: Maps writes of whole values to the ops that pass these on.
        whole: Writes whose values must stay whole until they are written.
        before: Control inputs of the ops being added.
    """

    def __init__(self, source: Any, target: Any, divide: Divide) -> None:
        self.source, self.target, self._divide = source, target, divide
        self.places: Places = {}
        self.handles: dict[int, Handles] = {}
        self.pieces = Pieces()
        self.values: dict[tf.Operation, tf.Operation] = {}
        self.whole: Collection[tf.Operation] = ()
        self.before: list[tf.Operation] = []
        self._given: dict[int, tf.Tensor] = {}
        self._kept: list[tf.Tensor] = []  # keeps their ids valid
        self._stubs: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def give(self, tensor: tf.Tensor, new: tf.Tensor) -> None:
        """Registers the substitute for a tensor that is not copied."""
        self._given[id(tensor)] = new
        self._kept.append(tensor)

    def divide(self, tensor: tf.Tensor, handles: Handles) -> None:
        """Registers the handles of parts that replace a handle."""
        self.handles[id(tensor)] = handles
        self._kept.append(tensor)

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the copy of a tensor, or a stub if that is yet to come."""
        if id(tensor) in self._given:
            return self._given[id(tensor)]
        if tensor.op not in self.places:
            return self._later(tensor)
        return stamping.of(self.places, tensor)

    def handles_of(self, op: tf.Operation) -> Handles | None:
        """Returns the replacement of the first handle among an op's inputs, or None."""
        for tensor in op.inputs:
            if id(tensor) in self.handles:
                return self.handles[id(tensor)]
        return None

    def add(
        self,
        ops: Sequence[tf.Operation],
        marks: Callable[[tf.Operation], bool] = lambda op: False,
    ) -> None:
        """Copies ops, replacing those that use partitioned variables.

        Args:
            ops: The ops, in order.
            marks: Whether an op is a gradient marker of a partitioned variable.
        """
        users = self._using(ops, marks)
        inside = set(users)
        stamp = stamping.Stamp(self.source, [op for op in ops if op not in inside])
        self._stubs.clear()
        others = dict(self.places)
        copies = stamp.press(self.target, "", self.tensor, _device, others)
        self.places.update(copies)
        with self.target.as_default():
            while users:
                waiting = []
                for op in users:
                    if self._knows(op) or marks(op):
                        self._put(op)
                    else:
                        waiting.append(op)
                assert len(waiting) < len(users), "every handle has a source"
                users = waiting
        stubs = [stub for _, stub in self._stubs.values()]
        _tf.abandon([stub.op for stub in stubs])

    def _using(
        self, ops: Sequence[tf.Operation], marks: Callable[[tf.Operation], bool]
    ) -> list[tf.Operation]:
        """Returns the ops on partitioned variables, those that pass them on first."""
        new_ops = set(ops)
        seen: dict[tf.Operation, None] = {}
        passing: list[tf.Operation] = []
        stack = [handle for handle in self._kept if id(handle) in self.handles]
        while stack:
            tensor = stack.pop()
            if tensor.op in new_ops:
                seen[tensor.op] = None
            for op in tensor.consumers():
                if op not in new_ops or op in seen:
                    continue
                seen[op] = None
                if op.type in uses.PASSED_ON:
                    passing.append(op)
                    stack += op.outputs
                elif op.type in uses.LOOPS:
                    pairs = zip(op.inputs, op.outputs, strict=True)
                    stack += [out for operand, out in pairs if operand is tensor]
        others = [op for op in ops if (op in seen or marks(op)) and op not in passing]
        return [*passing, *others]

    def _knows(self, op: tf.Operation) -> bool:
        """Whether the replacement of an op's handles is known."""
        return any(id(tensor) in self.handles for tensor in (*op.inputs, *op.outputs))

    def _later(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the stub of a tensor that is yet to come."""
        if id(tensor) not in self._stubs:
            with (
                self.target.as_default(),
                tf.device(None),
                tf.control_dependencies(None),
                tf.name_scope(_LATER),
            ):
                stub = tf.compat.v1.placeholder(tensor.dtype, tensor.shape)
            _tf.copy_handle_data(tensor, stub)
            self._stubs[id(tensor)] = tensor, stub
        return self._stubs[id(tensor)][1]

    def _put(self, op: tf.Operation) -> None:
        """Replaces an op that uses parts."""
        if all(id(out) in self.handles for out in op.outputs) and op.outputs:
            return  # it makes a handle
        with self.around(op):
            replacement = self._divide(self, op)
        if replacement is not None:
            self.become(op, replacement)

    def become(self, op: tf.Operation, new: tf.Operation) -> None:
        """Registers the replacement of an op, and connects it to ops waiting for it."""
        self.places[op] = new
        _tf.copy_line(op, new)
        for tensor in op.outputs:
            if id(tensor) in self._stubs:
                _tf.replace(self._stubs[id(tensor)][1], new.outputs[tensor.value_index])
        for waiting in _tf.control_outputs(op):
            if waiting in self.places:
                _tf.add_control_inputs(self.places[waiting], [new])

    @contextlib.contextmanager
    def around(self, op: tf.Operation) -> Iterator[None]:
        """Adds this block's ops in place of an op: its device, its control inputs."""
        before = [
            self.places[source] for source in op.control_inputs if source in self.places
        ]
        handles = self.handles_of(op)
        if handles is not None and handles.pivot is not None:
            before.append(handles.pivot)
        self.before = before
        with (
            tf.name_scope(f"{_PARTS}{op.name}/"),
            tf.device(op.device),
            tf.control_dependencies(before),
        ):
            start = _tf.operation_count(self.target)
            yield
            for new_op in self.target.get_operations()[start:]:
                _tf.copy_line(op, new_op)


def joined(parts: Sequence[tf.Tensor], cut: Cut, name: str | None = None) -> tf.Tensor:
    """Returns the join of parts.

    Args:
        parts: The parts.
        cut: How they were split.
        name: The name of the op that joins them, outside all scopes.
    """
    axis = tf.constant(cut.axis)
    with contextlib.nullcontext() if name is None else tf.name_scope(""):
        value: tf.Tensor = tf.raw_ops.ConcatV2(values=parts, axis=axis, name=name)
    return value


def _device(op: tf.Operation) -> str:
    device: str = op.device
    return device
