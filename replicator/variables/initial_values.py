# SPDX-License-Identifier: Apache-2.0
"""Initial values of variables: dtypes and shapes, values made in a step, and slices.

The initial value of a variable in parts is made whole on the host, once, and lives
there until its parts are created. Drawing each part by itself would need half of that
memory, but has to know how every generator counts: one that counts otherwise begins
with other values, without an error. It is also slow, as each variable's initial value
has to be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import ops as tf_ops
from replicator._tf import variables
from replicator.graph.ir import walk
from replicator.graph.ir.kinds import kind_of
from replicator.graph.passes.rows import Parts, offsets_of


def dtype_and_shape(kwargs: dict[str, Any]) -> tuple[tf.DType, tf.TensorShape]:
    """Returns the dtype and shape of a variable, from its creator's arguments.

    If Python computes the value, the result becomes the initial value, so that Python
    computes it only once.
    """
    value, dtype = kwargs.get("initial_value"), kwargs.get("dtype")

    def initial_value() -> tf.Tensor:
        return tf.convert_to_tensor(value() if callable(value) else value, dtype)

    if callable(value):
        # Traced but not run, as initializers may draw random numbers; and not turned
        # into a function, which takes several times as long.
        graph = tf.__internal__.FuncGraph("initial_value")
        with context.building(None), graph.as_default():
            value = initial_value()
        constant = _constant_behind(value)
        if constant is not None:  # computed by Python, perhaps by a generator
            kwargs["initial_value"] = constant
    else:
        value = initial_value()
    shape = kwargs.get("shape")
    return value.dtype, value.shape if shape is None else tf.TensorShape(shape)


def _constant_behind(value: tf.Tensor) -> Any:
    """Returns the value of a tensor that is a constant of its graph, else None."""
    if not tf.is_symbolic_tensor(value):
        return None
    while value.op.type == "Identity":
        (value,) = value.op.inputs
    return tf.get_static_value(value) if value.op.type == "Const" else None


def placeholder(kwargs: dict[str, Any]) -> Callable[[], tf.Tensor]:
    """Returns an initial value for a variable that a SavedModel's values will fill."""
    shape = [size or 0 for size in tf.TensorShape(kwargs["shape"]).as_list()]
    return lambda: tf.zeros(shape, kwargs.get("dtype", tf.float32))


def lifted(initial_value: Any) -> Any:
    """Lifts an initial value out of the function being traced."""
    if callable(initial_value) or not tf.is_tensor(initial_value):
        return initial_value
    if isinstance(initial_value, tf.Variable) or not tf.is_symbolic_tensor(
        initial_value
    ):
        return initial_value
    with tf.init_scope():
        outside = tf.compat.v1.get_default_graph()
        if not tf.executing_eagerly() and initial_value.graph is outside:
            return initial_value
    try:
        lifted = variables.lift_initial_value(initial_value)
        sources = walk.upstream([initial_value.op], walk.computed_from)
        # The ops left behind draw random numbers for nobody: they are not in the step.
        tf_ops.abandon([op for op in sources if kind_of(op).stateful])
        return lifted
    except variables.UnliftableError as error:
        raise errors.ContextError(
            "the initial value of a variable created in a step depends on the step's "
            "inputs or state.",
            fix="pass a function without arguments, lambda: ..., or a value that does "
            "not depend on the batch.",
        ) from error


HOST = "/device:CPU:0"


def pieces(
    initial_value: Any, dtype: tf.DType | None, layout: Parts
) -> list[Callable[[], tf.Tensor]]:
    """Returns functions that return each part's initial value.

    Args:
        initial_value: The whole initial value, or a function without arguments.
        dtype: The variable's dtype; None means the value's.
        layout: How the variable is divided.
    """
    with tf.device(None), tf.device(HOST):
        whole = initial_value() if callable(initial_value) else initial_value
        whole = tf.convert_to_tensor(getattr(whole, "wrapped_value", whole), dtype)
    bounds = zip(offsets_of(layout.sizes), layout.sizes, strict=True)
    return [_slicer(whole, layout.axis, *piece) for piece in bounds]


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
