# SPDX-License-Identifier: Apache-2.0
"""Copies a graph, or the body of a function, with variables of it in parts.

Most ops are copied as they are, at once. Those that use a variable which is divided
give way to others, which use its parts: part_ops.py says which.
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

# Returns what is in the place of an op, or None if it says so itself.
Divide = Callable[["Rewriter", tf.Operation], tf.Operation | None]


# No op may be named as a scope is in which others are already.
_PARTS = "AutoDist-parts/"  # where what uses parts is named
_LATER = "AutoDist-later/"  # where what waits for a tensor is named


@dataclasses.dataclass(frozen=True)
class Handles:
    """What is in the place of a handle.

    Attributes:
        cut: How its variable is divided.
        parts: The handles of the parts.
        pivot: In control flow of TensorFlow 1, what ops without operands wait for, so
            that they do not run where the others do not.
    """

    cut: Cut
    parts: tuple[tf.Tensor, ...]
    pivot: tf.Operation | None = None


class Rewriter:
    """Copies ops of one graph into another, where variables are in parts.

    Args:
        source: Where they are.
        target: Where they go.
        divide: Puts what uses parts in the place of an op.

    Attributes:
        places: What ops have become.
        handles: What is in the place of handles, by the ids of those.
        pieces: What of tensors belongs to parts.
        values: What passes on a value that is written as a whole, by what writes it.
        whole: What writes values that are not to be divided before.
        before: What is waited for where ops are being added.
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
        self._kept: list[tf.Tensor] = []  # whose ids are known
        self._stubs: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}

    def give(self, tensor: tf.Tensor, new: tf.Tensor) -> None:
        """Says what is in the place of a tensor, which is not copied."""
        self._given[id(tensor)] = new
        self._kept.append(tensor)

    def divide(self, tensor: tf.Tensor, handles: Handles) -> None:
        """Says what is in the place of a handle."""
        self.handles[id(tensor)] = handles
        self._kept.append(tensor)

    def tensor(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what a tensor has become, or what waits for it."""
        if id(tensor) in self._given:
            return self._given[id(tensor)]
        if tensor.op not in self.places:
            return self._later(tensor)
        return stamping.of(self.places, tensor)

    def handles_of(self, op: tf.Operation) -> Handles | None:
        """Returns what is in the place of the first handle that an op is given."""
        for tensor in op.inputs:
            if id(tensor) in self.handles:
                return self.handles[id(tensor)]
        return None

    def add(
        self,
        ops: Sequence[tf.Operation],
        marks: Callable[[tf.Operation], bool] = lambda op: False,
    ) -> None:
        """Copies ops.

        Args:
            ops: In their order.
            marks: Whether an op is the marker of a gradient of what is divided.
        """
        own = self._using(ops, marks)
        inside = set(own)
        stamp = stamping.Stamp(self.source, [op for op in ops if op not in inside])
        self._stubs.clear()
        others = dict(self.places)
        new = stamp.press(self.target, "", self.tensor, _device, others)
        self.places.update(new)
        with self.target.as_default():
            while own:
                waiting = []
                for op in own:
                    if self._knows(op) or marks(op):
                        self._put(op)
                    else:
                        waiting.append(op)
                assert len(waiting) < len(own), "every handle has a source"
                own = waiting
        left = [stub for _, stub in self._stubs.values()]
        _tf.abandon([stub.op for stub in left])

    def _using(
        self, ops: Sequence[tf.Operation], marks: Callable[[tf.Operation], bool]
    ) -> list[tf.Operation]:
        """Returns the ops that use what is divided, those first that pass it on."""
        new = set(ops)
        seen: dict[tf.Operation, None] = {}
        passing: list[tf.Operation] = []
        stack = [one for one in self._kept if id(one) in self.handles]
        while stack:
            tensor = stack.pop()
            if tensor.op in new:
                seen[tensor.op] = None
            for op in tensor.consumers():
                if op not in new or op in seen:
                    continue
                seen[op] = None
                if op.type in uses.PASSED_ON:
                    passing.append(op)
                    stack += op.outputs
                elif op.type in uses.LOOPS:
                    pairs = zip(op.inputs, op.outputs, strict=True)
                    stack += [out for own, out in pairs if own is tensor]
        others = [op for op in ops if (op in seen or marks(op)) and op not in passing]
        return [*passing, *others]

    def _knows(self, op: tf.Operation) -> bool:
        """Whether it is known what is in the place of an op's handles."""
        return any(id(one) in self.handles for one in (*op.inputs, *op.outputs))

    def _later(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what waits for a tensor that is yet to come."""
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
        """Puts what uses parts in the place of an op."""
        if all(id(out) in self.handles for out in op.outputs) and op.outputs:
            return  # it is a handle
        with self.around(op):
            new = self._divide(self, op)
        if new is not None:
            self.become(op, new)

    def become(self, op: tf.Operation, new: tf.Operation) -> None:
        """Says what an op has become."""
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
        """In this block, ops are added where an op was."""
        before = [self.places[one] for one in op.control_inputs if one in self.places]
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
            for made in self.target.get_operations()[start:]:
                _tf.copy_line(op, made)


def joined(parts: Sequence[tf.Tensor], cut: Cut, name: str | None = None) -> tf.Tensor:
    """Returns what parts are together.

    Args:
        parts: The parts.
        cut: How they were divided.
        name: What the op is called that joins them, outside of all scopes.
    """
    axis = tf.constant(cut.axis)
    with contextlib.nullcontext() if name is None else tf.name_scope(""):
        value: tf.Tensor = tf.raw_ops.ConcatV2(values=parts, axis=axis, name=name)
    return value


def _device(op: tf.Operation) -> str:
    device: str = op.device
    return device
