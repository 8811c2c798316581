# SPDX-License-Identifier: Apache-2.0
"""Guards: ops that fail before any variable is written if a write would fail.

Rows that do not exist and values of another shape are detected only by the write, when
other writes may have happened. So each write that can fail in these ways gets a guard:
an op on its device that fails where the write would, and that graph/order/phases.py
orders before all writes. Rows that the step has looked up exist, and need no guard; nor
do rows computed in the same way. Writes inside a replica's own conditional, loop or
function get none.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from replicator._tf import effects, ops
from replicator.graph.ir import shapes
from replicator.graph.ir.kinds import kind_of
from replicator.graph.same.keys import Key, Keys

# The names in op definitions of the rows that an op writes, and of their values.
_INDICES = "indices"
_VALUES = ("value", "updates", "grad", "delta")

# Ops whose results hold only elements of their first operand, or of all but the last.
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
    """Adds guards to writes; returns them.

    Args:
        writes: Ops that write variables, in one graph.
        level: The length of the longest chain of writes on which each op that runs
            depends.
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
        static_shape = ops.resource_shape(op.inputs[0])
        if not static_shape.is_fully_defined():
            continue
        shape = static_shape.as_list()
        with tf.control_dependencies(None), tf.device(op.device):
            if indices is None:
                guards.append(_shape_fits(op, value, shape))
                continue
            axes = _axes(op, indices)
            if axes is None:
                continue
            if not lookups.cover(op, indices, shape[0]):
                guards += _rows_exist(op, indices, shape[:axes])
            static_shape = shapes.static(value) if op in fitting else None
            if static_shape is None or list(static_shape[1:]) != shape[1:]:
                guards += _rows_fit(op, indices, value, shape[axes:])
    return guards


def _rows_exist(
    op: tf.Operation, indices: tf.Tensor, end: list[int]
) -> Iterator[tf.Operation]:
    """Yields a guard against rows that do not exist; none on GPUs, where none fails.

    Args:
        op: The write.
        indices: The rows that it writes.
        end: The number of rows along each axis that the indices address.
    """
    if tf.DeviceSpec.from_string(op.device).device_type == "GPU":
        return
    exist = (indices >= 0) & (indices < tf.constant(end, indices.dtype))
    text = f"{op.name} writes rows that do not exist; there are {end}, and it writes:"
    yield _assert(tf.reduce_all(exist), [text, indices])


def _rows_fit(
    op: tf.Operation, indices: tf.Tensor, rows: tf.Tensor, shape: list[int]
) -> Iterator[tf.Operation]:
    """Yields a guard against values of another shape than the rows they are written to.

    Args:
        op: The write.
        indices: The rows that it writes.
        rows: The values; a scalar is one number for all elements.
        shape: The shape of a row.
    """
    fixed = indices.shape.is_fully_defined() and rows.shape.is_fully_defined()
    if fixed or rows.shape.rank == 0:
        return
    by_element = _by_element(op)
    places = tf.shape(indices)[: -1 if by_element else None]
    one_number = op.type.startswith("ResourceScatter") and not by_element
    yield _shape_fits(op, rows, tf.concat([places, shape], 0), one_number)


def _axes(op: tf.Operation, indices: tf.Tensor) -> int | None:
    """Returns how many axes of a variable indices address, None if that is unknown."""
    if not _by_element(op):
        return 1
    static_shape = shapes.static(indices)
    return static_shape[-1] if static_shape else None


def _by_element(op: tf.Operation) -> bool:
    """Whether the last axis of an op's indices addresses axes of the variable."""
    return op.type.startswith("ResourceScatterNd")


class _Lookups:
    """The lookups of rows in a step, each of which fails if a row does not exist.

    Args:
        level: As for `add`; ops that can fail come before the writes of their level.
    """

    def __init__(self, level: Mapping[tf.Operation, int]) -> None:
        self._level = level
        self._labels = Keys()
        # By the label of indices: the number of rows and the level of each lookup.
        self._by_label: dict[Key, list[tuple[int, int]]] | None = None

    def cover(self, write: tf.Operation, indices: tf.Tensor, count: int) -> bool:
        """Whether these rows are looked up, among as many, before a write.

        Args:
            write: The op that writes them.
            indices: Rows of a variable.
            count: The number of rows of the variable.
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
        """Whether these rows, or rows computed alike (a part's, say), are looked up."""
        if self._by_label is None:
            self._by_label = {}
            for op, level in self._level.items():
                if op.type == "ResourceGather":
                    self._enter(op, level)
        if not self._by_label:
            return False
        places = self._by_label.get(self._labels.of(tensor), ())
        return any(rows == count and level <= before for rows, level in places)

    def _enter(self, op: tf.Operation, level: int) -> None:
        if tf.DeviceSpec.from_string(op.device).device_type != "CPU":
            return  # GPUs return zeros for rows that do not exist
        shape = ops.resource_shape(op.inputs[0])
        if shape.rank and op.get_attr("batch_dims") == 0:
            assert self._by_label is not None, "created by the caller"
            label = self._labels.of(op.inputs[1])
            self._by_label.setdefault(label, []).append((shape.as_list()[0], level))


def _shape_fits(
    op: tf.Operation, value: tf.Tensor, shape: Any, one_number: bool = False
) -> tf.Operation:
    """Returns a guard against a value of another shape than the op can write.

    Args:
        op: The write.
        value: The value that it writes.
        shape: The shape that the value must have.
        one_number: Whether the value may also be a scalar.
    """
    value_shape = shapes.when_run(value)
    text = f"{op.name} writes a value whose shape differs from what it writes to:"
    # Not one comparison, which would broadcast sizes, or fail with another message.
    same = tf.raw_ops.Equal(x=value_shape, y=shape, incompatible_shape_error=False)
    fits = tf.reduce_all(same) & tf.equal(tf.size(value_shape), tf.size(shape))
    if one_number:
        fits |= tf.equal(tf.size(value_shape), 0)
    return _assert(fits, [text, value_shape, shape])


def _assert(condition: tf.Tensor, data: list[Any]) -> tf.Operation:
    """Returns an assertion that is not ordered with others.

    An op without an effect would not do: nothing uses its value, so TensorFlow may
    prune it. And tf.debugging.Assert adds a conditional at times.
    """
    op = tf.raw_ops.Assert(condition=condition, data=data)
    effects.run_independently(op.graph, op)
    return op


def _operands_of(op: tf.Operation) -> dict[str, int]:
    """Returns the positions of an op's operands, by their names."""
    if op.type not in _operands:
        arguments = op.op_def.input_arg
        _operands[op.type] = {a.name: k for k, a in enumerate(arguments)}
    return _operands[op.type]
