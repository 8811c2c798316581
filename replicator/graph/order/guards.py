# SPDX-License-Identifier: Apache-2.0
"""What could make a write itself fail is asked before any variable is written.

Rows that do not exist and values of another shape are found by the write, when others
may be done. So each write that can fail by them gets a guard: an op of its device that
fails where the write would, and that graph/order/phases.py has come before all writes.
Rows that the step has looked up exist, and need none; nor do those computed alike. What
is inside a replica's own conditional, loop or function gets none.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.equal.value_numbering import Labels
from replicator.graph.ir import shapes
from replicator.graph.ir.kinds import kind_of

# What op definitions call where an op writes, and what.
_INDICES = "indices"
_VALUES = ("value", "updates", "grad", "delta")

# Ops whose results are among the numbers of their first operand, or all but the last.
_SAME = frozenset(
    "Identity PlaceholderWithDefault Reshape Squeeze ExpandDims StopGradient Unique "
    "Slice StridedSlice Snapshot".split()
)
_JOINING = "ConcatV2"

_operands: dict[str, dict[str, int]] = {}  # by op type; op.op_def is a costly copy


def add(
    writes: Iterable[tf.Operation],
    level: Mapping[tf.Operation, int],
    fitting: Container[tf.Operation],
) -> list[tf.Operation]:
    """Adds ops that fail if a write would; returns them.

    Args:
        writes: Ops that write variables, in one graph.
        level: How many writes, one behind the other, each op that runs depends on.
        fitting: Writes of as many rows as there are indices.
    """
    guards: list[tf.Operation] = []
    lookups = _Lookups(level)
    for op in writes:
        operands = {} if kind_of(op).calls else _operands_of(op)
        value = next((op.inputs[operands[n]] for n in _VALUES if n in operands), None)
        if value is None or op.type == "ResourceStridedSliceAssign":
            continue
        indices = op.inputs[operands[_INDICES]] if _INDICES in operands else None
        if indices is None and value.shape.is_fully_defined():
            continue  # it fits, or the op would not have been built
        known = _tf.resource_shape(op.inputs[0])
        if not known.is_fully_defined():
            continue
        shape = known.as_list()
        with tf.control_dependencies(None), tf.device(op.device):
            if indices is None:
                guards.append(_shape_fits(op, value, shape))
                continue
            axes = _axes(op, indices)
            if axes is None:
                continue
            if not lookups.cover(op, indices, shape[0]):
                guards += _rows_exist(op, indices, shape[:axes])
            known = shapes.static(value) if op in fitting else None
            if known is None or list(known[1:]) != shape[1:]:
                guards += _rows_fit(op, indices, value, shape[axes:])
    return guards


def _rows_exist(
    op: tf.Operation, indices: tf.Tensor, end: list[int]
) -> Iterator[tf.Operation]:
    """Yields what fails if an op writes rows that do not exist; on GPUs, it does not.

    Args:
        op: Writes them.
        indices: Which.
        end: How many there are, along each axis that the indices go along.
    """
    if tf.DeviceSpec.from_string(op.device).device_type == "GPU":
        return
    exist = (indices >= 0) & (indices < tf.constant(end, indices.dtype))
    text = f"{op.name} writes rows that do not exist, of {end}, among:"
    yield _assert(tf.reduce_all(exist), [text, indices])


def _rows_fit(
    op: tf.Operation, indices: tf.Tensor, rows: tf.Tensor, shape: list[int]
) -> Iterator[tf.Operation]:
    """Yields what fails if an op writes other rows than there are places for.

    Args:
        op: Writes them.
        indices: Where.
        rows: What is written; one number for all elements, if a scalar.
        shape: Of a row.
    """
    fixed = indices.shape.is_fully_defined() and rows.shape.is_fully_defined()
    if fixed or rows.shape.rank == 0:
        return
    by_element = _by_element(op)
    places = tf.shape(indices)[: -1 if by_element else None]
    one_number = op.type.startswith("ResourceScatter") and not by_element
    yield _shape_fits(op, rows, tf.concat([places, shape], 0), one_number)


def _axes(op: tf.Operation, indices: tf.Tensor) -> int | None:
    """Returns along how many axes of a variable indices go, None if that is unknown."""
    if not _by_element(op):
        return 1
    known = shapes.static(indices)
    return known[-1] if known else None


def _by_element(op: tf.Operation) -> bool:
    """Whether the last axis of an op's indices goes along axes of the variable."""
    return op.type.startswith("ResourceScatterNd")


class _Lookups:
    """The lookups of rows in a step, each of which fails if a row does not exist.

    Args:
        level: As for `add`; what can fail comes before the writes of its level.
    """

    def __init__(self, level: Mapping[tf.Operation, int]) -> None:
        self._level = level
        self._labels = Labels()
        # By the label of indices: of how many rows they are looked up, on which level.
        self._found: dict[int, list[tuple[int, int]]] | None = None

    def cover(self, write: tf.Operation, indices: tf.Tensor, count: int) -> bool:
        """Whether rows of these indices, of as many, are looked up before a write.

        Args:
            write: Writes them.
            indices: Of rows of a variable.
            count: How many rows that has.
        """
        before = self._level.get(write, 0)
        seen, stack = set(), [indices]
        while stack:
            tensor = stack.pop()
            if id(tensor) in seen or self._are_looked_up(tensor, count, before):
                continue
            seen.add(id(tensor))
            op = tensor.op
            if op.type in _SAME and tensor.value_index == 0:
                stack.append(op.inputs[0])
            elif op.type == _JOINING:
                stack += list(op.inputs)[:-1]
            else:
                return False
        return True

    def _are_looked_up(self, tensor: tf.Tensor, count: int, before: int) -> bool:
        """Whether these rows are, or those computed alike: the rows of a part, say."""
        if self._found is None:
            self._found = {}
            for op, level in self._level.items():
                if op.type == "ResourceGather":
                    self._enter(op, level)
        if not self._found:
            return False
        places = self._found.get(self._labels.of(tensor), ())
        return any(rows == count and level <= before for rows, level in places)

    def _enter(self, op: tf.Operation, level: int) -> None:
        if tf.DeviceSpec.from_string(op.device).device_type != "CPU":
            return  # GPUs give zeros
        shape = _tf.resource_shape(op.inputs[0])
        if shape.rank and op.get_attr("batch_dims") == 0:
            assert self._found is not None, "made just now"
            label = self._labels.of(op.inputs[1])
            self._found.setdefault(label, []).append((shape.as_list()[0], level))


def _shape_fits(
    op: tf.Operation, value: tf.Tensor, shape: Any, one_number: bool = False
) -> tf.Operation:
    """Returns what fails if an op writes a value of another shape.

    Args:
        op: Writes the value.
        value: What is written.
        shape: The shape that it must have.
        one_number: Whether it may be a scalar, too.
    """
    own = shapes.when_run(value)
    text = f"{op.name} writes a value of another shape than is written:"
    # Not by one comparison, which would broadcast sizes, or fail with another text.
    same = tf.raw_ops.Equal(x=own, y=shape, incompatible_shape_error=False)
    fits = tf.reduce_all(same) & tf.equal(tf.size(own), tf.size(shape))
    if one_number:
        fits |= tf.equal(tf.size(own), 0)
    return _assert(fits, [text, own, shape])


def _assert(condition: tf.Tensor, data: list[Any]) -> tf.Operation:
    """Returns an assertion, in no order with others.

    An op without an effect would not do: nothing uses its value, so TensorFlow may
    leave it out. And tf.debugging.Assert adds a conditional at times.
    """
    op = tf.raw_ops.Assert(condition=condition, data=data)
    _tf.run_independently(op.graph, op)
    return op


def _operands_of(op: tf.Operation) -> dict[str, int]:
    """Returns the positions of an op's operands, by their names."""
    if op.type not in _operands:
        arguments = op.op_def.input_arg
        _operands[op.type] = {a.name: k for k, a in enumerate(arguments)}
    return _operands[op.type]
