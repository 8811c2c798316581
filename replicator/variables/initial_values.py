# SPDX-License-Identifier: Apache-2.0
"""Initial values of variables: their dtype and shape, and values made in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import ops as tf_ops
from replicator._tf import variables
from replicator.graph.ir.kinds import kind_of


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
        sources = _sources(initial_value)
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


def _sources(tensor: tf.Tensor) -> list[tf.Operation]:
    """Returns the ops of the tensor's graph that it is computed from."""
    ops = {tensor.op: None}
    stack = [tensor.op]
    while stack:
        for source in stack.pop().inputs:
            if source.op not in ops:
                ops[source.op] = None
                stack.append(source.op)
    return list(ops)
