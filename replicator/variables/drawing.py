# SPDX-License-Identifier: Apache-2.0
"""Initial values of variables in parts: each part gets its slice of the whole.

The whole is never materialized if its parts can be drawn one by one. That holds for
constants, for uniform and normal random numbers of stateless generators, and for what
is computed from these element by element. Any other value is drawn whole on the host
and passed on in slices.

Philox (Salmon et al. 2011) computes each group of numbers from one counter value, and
counts up: numbers further on are those that start at a larger counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.graph.ir import shapes
from replicator.graph.passes.rows import offsets_of

HOST = "/device:CPU:0"
_ELEMENTWISE = frozenset(
    "Identity Cast Add AddV2 Sub Mul RealDiv FloorMod Neg Square Sqrt Exp Abs".split()
)
# The generators, and by how much the counter grows from one group to the next:
# truncated normals are redrawn until they fit, from counters reserved for that.
_GENERATORS = {
    "StatelessRandomUniformV2": 1,
    "StatelessRandomNormalV2": 1,
    "StatelessTruncatedNormalV2": 256,
}
_PHILOX = 1
_CHOSEN = (_PHILOX, 3)  # 3: the device chooses, which is Philox on CPUs and GPUs
_GROUP = {tf.float32: 4, tf.float64: 2}  # numbers computed from one counter value


class WholeOnly(Exception):
    """A value cannot be drawn in parts; only the whole can."""


def pieces(
    initial_value: Any, dtype: tf.DType | None, axis: int, sizes: Sequence[int]
) -> list[Callable[[], tf.Tensor]]:
    """Returns functions that draw each part's initial value, to be called in order.

    Args:
        initial_value: The whole initial value, or a function without arguments.
        dtype: The variable's dtype; None means the value's.
        axis: The axis along which the variable is in parts.
        sizes: The sizes of the parts along the axis.
    """
    bounds = list(zip(offsets_of(sizes), sizes, strict=True))
    if callable(initial_value) and tf.executing_eagerly():
        traced_value = _traced(initial_value, dtype)
        if traced_value is not None and all(
            _can_draw(traced_value, axis, *piece) for piece in bounds
        ):
            return [_drawer(traced_value, axis, *piece) for piece in bounds]
    with tf.device(None), tf.device(HOST):
        whole = initial_value() if callable(initial_value) else initial_value
        whole = tf.convert_to_tensor(getattr(whole, "wrapped_value", whole), dtype)
    return [_slicer(whole, axis, *piece) for piece in bounds]


def _slicer(
    whole: tf.Tensor, axis: int, offset: int, size: int
) -> Callable[[], tf.Tensor]:
    """Returns a function that slices a value on the host."""
    begin, length = [0] * whole.shape.rank, whole.shape.as_list()
    begin[axis], length[axis] = offset, size

    def draw() -> tf.Tensor:
        with tf.device(None), tf.device(HOST):
            return tf.slice(whole, begin, length)

    if tf.executing_eagerly():
        return draw
    # In a tf.Graph, the inputs of an initial value lie beside the variable.
    drawn = draw()
    return lambda: drawn


def _traced(initial_value: Callable[[], Any], dtype: tf.DType | None) -> Any:
    """Traces a value; returns its symbolic tensor, or None if it depends on state."""

    def made() -> tf.Tensor:
        value = initial_value()
        return tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype)

    with context.building(None):
        traced = tf.function(made, autograph=False).get_concrete_function()
    return None if traced.graph.captures else traced.outputs[0]


def _drawer(
    value: tf.Tensor, axis: int, offset: int, size: int
) -> Callable[[], tf.Tensor]:
    """Returns a function that draws a part of a traced value where it is called."""
    return lambda: _draw(value, axis, offset, size, {})


def _can_draw(value: tf.Tensor, axis: int, offset: int, size: int) -> bool:
    """Whether a part of a traced value can be drawn without the whole."""

    def draw() -> tf.Tensor:
        return _draw(value, axis, offset, size, {})

    try:
        with context.building(None):
            tf.function(draw, autograph=False).get_concrete_function()
    except WholeOnly:
        return False
    return True


def _draw(
    tensor: tf.Tensor, axis: int, offset: int, size: int, known: dict[int, tf.Tensor]
) -> tf.Tensor:
    """Computes a part of the value of a traced function's tensor.

    Args:
        tensor: The function's tensor; its shape is the whole's or broadcasts to it.
        axis: The axis along which the part is taken.
        offset: Where the part begins.
        size: The part's size along the axis.
        known: The values computed so far, by the ids of their tensors.

    Raises:
        WholeOnly: The tensor is computed in a way that cannot be done in parts.
    """
    op = tensor.op
    if not tensor.shape.is_fully_defined():
        raise WholeOnly
    if not tensor.shape.rank:
        return _number(tensor, known)
    shape = list(shapes.defined(tensor))
    if op.type in _ELEMENTWISE and shape[axis] > 1:
        if any(len(shapes.defined(t)) not in (0, len(shape)) for t in op.inputs):
            raise WholeOnly
        parts = [_draw(t, axis, offset, size, known) for t in op.inputs]
        return _applied(op, parts)
    part = [size if k == axis else n for k, n in enumerate(shape)]
    if op.type == "Fill":
        return tf.fill(part, _number(op.inputs[1], known))
    if op.type in _GENERATORS and axis == 0:
        return _random(op, math.prod(shape[1:]), offset, part, known)
    constant = tf.get_static_value(tensor)
    if op.type == "Const" and shape[axis] > 1:  # TensorFlow folds small values to these
        return tf.constant(constant.take(range(offset, offset + size), axis))
    raise WholeOnly


def _random(
    op: tf.Operation,
    row: int,
    offset: int,
    part: Sequence[int],
    known: dict[int, tf.Tensor],
) -> tf.Tensor:
    """Draws rows of random numbers, equal to those rows of the whole.

    Args:
        op: The op that draws the whole.
        row: The count of numbers in a row.
        offset: The first row.
        part: The shape of the rows to draw.
        known: The values computed so far, by the ids of their tensors.
    """
    dtype = op.outputs[0].dtype
    if tf.get_static_value(op.inputs[3]) not in _CHOSEN or dtype not in _GROUP:
        raise WholeOnly
    key, counter = (_small(t, known) for t in op.inputs[1:3])
    groups, skipped = divmod(offset * row, _GROUP[dtype])
    counter_offset = groups * _GENERATORS[op.type]
    low = counter[0] + tf.constant(counter_offset, tf.uint64)
    high = counter[1] + tf.cast(low < counter[0], tf.uint64)
    count = math.prod(part)
    numbers = getattr(tf.raw_ops, op.type)(
        shape=[skipped + count],
        key=key,
        counter=tf.stack([low, high]),
        alg=_PHILOX,
        dtype=dtype,
    )
    if skipped:
        numbers = numbers[skipped:]
    return tf.reshape(numbers, part)


def _number(tensor: tf.Tensor, known: dict[int, tf.Tensor]) -> tf.Tensor:
    if tensor.shape.rank:
        raise WholeOnly
    return _small(tensor, known)


def _small(tensor: tf.Tensor, known: dict[int, tf.Tensor]) -> tf.Tensor:
    """Computes a tensor that is not of the variable's shape: a scalar, a key, ..."""
    if id(tensor) in known:
        return known[id(tensor)]
    op = tensor.op
    if op.type == "Const":
        result = tf.constant(tf.get_static_value(tensor))
    elif op.type in _ELEMENTWISE:
        result = _applied(op, [_small(t, known) for t in op.inputs])
    elif op.type == "StatelessRandomGetKeyCounter":
        both = tf.raw_ops.StatelessRandomGetKeyCounter(seed=_small(op.inputs[0], known))
        known.update({id(t): value for t, value in zip(op.outputs, both, strict=True)})
        return known[id(tensor)]
    else:
        raise WholeOnly
    known[id(tensor)] = result
    return result


def _applied(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
    """Applies an elementwise op to other inputs."""
    if op.type == "Cast":
        return tf.cast(inputs[0], op.outputs[0].dtype)
    if op.type == "Identity":
        return inputs[0]
    names = [argument.name for argument in op.op_def.input_arg]
    result: tf.Tensor = getattr(tf.raw_ops, op.type)(
        **dict(zip(names, inputs, strict=True))
    )
    return result
