# SPDX-License-Identifier: Apache-2.0
"""How a variable in parts is read: joined, or by rows where these are; and gradients.

What is read is tied to the variable's handle by one op, IdentityN with a gradient of
its own: the parts are unknown to tapes and tf.gradients, and the gradient of the whole
arrives for the whole. graph/passes/ties.py takes the ties of a step out again.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.graph.passes.rows import gathered, vector
from replicator.graph.passes.ties import GRADIENT_TYPE, STAND_IN


def joined(variable: Any) -> tf.Tensor:
    """Returns the whole value of a PartitionedVariable.

    Args:
        variable: The variable, of any shape.
    """
    _refuse_compiled(variable)
    _tf.note_access(variable)
    with _tf.stop_recording():
        own = [part.read_value() for part in variable.parts]
        with _here():
            value = tf.concat(own, variable.axis)
        value.set_shape(variable.shape)
    return _tied(variable, value)


def rows(variable: Any, indices: Any) -> tf.Tensor:
    """Returns rows of a PartitionedVariable; their owners alone are asked for them.

    Args:
        variable: The variable, shape [n, ...].
        indices: Which rows, integers of any shape.

    Returns:
        A tensor of shape [*indices.shape, ...].
    """
    _refuse_compiled(variable)
    indices = tf.convert_to_tensor(indices)
    _tf.note_access(variable)
    with _tf.stop_recording():
        own = [part.sparse_read for part in variable.parts]
        value = gathered(own, indices, variable.axis, variable.sizes)
        value.set_shape(indices.shape.concatenate(variable.shape[1:]))
    return _tied(variable, value, indices)


def _refuse_compiled(variable: Any) -> None:
    """Raises UnsupportedError in a function that XLA compiles, for one device."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    if _tf.compiled_function(graph, None) is not None:
        raise errors.UnsupportedError(
            errors.compose(
                f"a function with jit_compile=True uses variable {variable.name}, but "
                f"it is in {len(variable.parts)} parts: XLA reaches one device only.",
                [f"at {errors.user_line()}"],
                "read it outside of the function, and pass what was read; or use a "
                "strategy that leaves this variable whole.",
            )
        )


def _here() -> Any:
    """Returns a block in which ops are on the device of the replica being built.

    Where variables are read, TensorFlow leaves the choice of a device open: that of the
    one variable is the only one that it may be.
    """
    replica = context.current()
    return contextlib.nullcontext() if replica is None else tf.device(replica.device)


def _tied(
    variable: Any, value: tf.Tensor, indices: tf.Tensor | None = None
) -> tf.Tensor:
    """Has gradients of what was read arrive at the variable's handle."""
    replica = context.current()
    if not (value.dtype.is_floating or value.dtype.is_complex):
        return value
    if replica is not None and replica.updating:
        return value  # by an optimizer, whose updates nobody differentiates
    shape = variable.shape
    if tf.executing_eagerly():
        with _tf.stop_recording():
            result = tf.identity(value)
        return _recorded(variable.handle, result, indices, shape)
    graph: Any = tf.compat.v1.get_default_graph()
    source = variable.handle
    around = _tf.around_loops(graph)
    if around is not None:
        source = _stand_in(variable, around)
    with _here():
        return tf.identity(_tie(graph, source, value, indices, shape))


def _stand_in(variable: Any, around: tf.Graph) -> tf.Tensor:
    """Returns a tensor that stands for a variable inside of a loop.

    The gradient of a loop adds up what belongs to a resource from outside, and asks the
    resource at run time how large that is. This tensor has the shape, and a gradient
    that goes to the variable. In a step, it takes no memory: see graph/passes/ties.py.

    Args:
        variable: The variable.
        around: The graph around the loop.
    """
    with around.as_default(), tf.control_dependencies(None), tf.name_scope("parts"):
        nothing = tf.zeros(variable.shape, variable.dtype)
        result = _tie(around, variable.handle, nothing, None, variable.shape)
    _tf.set_text_attr(result.op, STAND_IN, STAND_IN)
    return result


def _tie(
    graph: Any,
    source: tf.Tensor,
    value: tf.Tensor,
    indices: tf.Tensor | None,
    shape: tf.TensorShape,
) -> tf.Tensor:
    """Adds a tie to a graph: what it returns is the value.

    Args:
        graph: The default graph.
        source: What gradients go to: the handle of a variable, or what stands for it.
        value: What was read.
        indices: Of which rows; None: of all.
        shape: The variable's.
    """
    if graph.building_function:  # before recording stops: tapes have to see it
        source = graph.capture(source)
    known = [value, source] if indices is None else [value, source, indices]
    with (
        _tf.stop_recording(),
        graph.gradient_override_map({"IdentityN": GRADIENT_TYPE}),
    ):
        result = tf.raw_ops.IdentityN(input=known)[0]
    if source.dtype == tf.resource:
        _tf.set_read_only_inputs(result.op, [1])  # of a function, it is an effect
    result.set_shape(value.shape)
    return _recorded(source, result, indices, shape)


def _recorded(
    source: tf.Tensor,
    result: tf.Tensor,
    indices: tf.Tensor | None,
    shape: tf.TensorShape,
) -> tf.Tensor:
    """Tells tapes where the gradient of what was read goes."""
    _tf.record_gradient(
        "parts", [result], [source], lambda d: [_gradient(d, indices, shape)]
    )
    return result


def _gradient(
    upstream: Any, indices: tf.Tensor | None, shape: tf.TensorShape
) -> tf.Tensor | tf.IndexedSlices:
    """Returns the gradient of the whole, dense or of the rows that were read."""
    if indices is None:
        return upstream
    flat, size = vector(indices)
    row = tf.constant(shape[1:].as_list(), size.dtype)
    return tf.IndexedSlices(
        tf.reshape(tf.convert_to_tensor(upstream), tf.concat([size, row], 0)),
        flat,
        tf.constant(shape.as_list(), tf.int32),
    )


@tf.RegisterGradient(GRADIENT_TYPE)
def _gradient_of_tie(op: tf.Operation, *upstream: Any) -> list[Any]:
    """tf.gradients asks here; tapes ask what `_tied` recorded."""
    if upstream[0] is None:
        return [None] * len(op.inputs)
    indices = op.inputs[2] if len(op.inputs) > 2 else None
    source = op.inputs[1]
    resource = source.dtype == tf.resource
    shape = _tf.resource_shape(source) if resource else source.shape
    own = _gradient(upstream[0], indices, shape)
    return [None, own, *([] if indices is None else [None])]
