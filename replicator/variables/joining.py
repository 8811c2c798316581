# SPDX-License-Identifier: Apache-2.0
"""Reads a variable in parts, joined or by rows where they are, and its gradients.

One op ties what is read to the variable's handle: IdentityN with a custom gradient.
Tapes and tf.gradients do not know the parts, so the gradient of the whole arrives at
the whole. graph/passes/ties.py removes a step's ties again.
"""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import control_flow, ops, tapes, variables
from replicator.graph.passes.rows import vector
from replicator.graph.passes.ties import GRADIENT_TYPE, PLACEHOLDER_VARIABLE


def joined(variable: Any) -> tf.Tensor:
    """Returns the whole value of a PartitionedVariable.

    Args:
        variable: The variable, of any shape.
    """
    _refuse_compiled(variable)
    variables.note_access(variable)
    with tapes.stop_recording():
        part_values = [part.read_value() for part in variable.parts]
        with _here():
            value = variable.layout.join(part_values)
        value.set_shape(variable.shape)
    return _tied(variable, value)


def rows(variable: Any, indices: Any) -> tf.Tensor:
    """Returns rows of a PartitionedVariable, fetched only from the parts with them.

    Args:
        variable: The variable, shape [n, ...].
        indices: The rows, integers of any shape.

    Returns:
        A tensor of shape [*indices.shape, ...].
    """
    _refuse_compiled(variable)
    indices = tf.convert_to_tensor(indices)
    if not tf.executing_eagerly() and control_flow.in_vectorized_body():
        # tf.vectorized_map cannot stack rows of which each turn asks a part for others.
        # In a step, the gather is turned into gathers of rows again.
        return tf.gather(joined(variable), indices)
    variables.note_access(variable)
    with tapes.stop_recording():
        part_reads = [part.sparse_read for part in variable.parts]
        value = variable.layout.rows(part_reads, indices)
        value.set_shape(indices.shape.concatenate(variable.shape[1:]))
    return _tied(variable, value, indices)


def _refuse_compiled(variable: Any) -> None:
    """Raises UnsupportedError inside a function that XLA compiles for one device."""
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    if control_flow.compiled_function(graph, None) is not None:
        raise errors.UnsupportedError(
            f"a function with jit_compile=True uses variable {variable.name}, but it "
            f"{variable.how_split}: XLA reaches one device only.",
            fix="read it outside the function, and pass the value; or use a strategy "
            "that leaves this variable whole.",
        )


def _here() -> Any:
    """Returns a block that puts ops on the device of the replica being built.

    TensorFlow sets no device where variables are read, as a plain variable's device is
    the only one possible.
    """
    replica = context.current()
    return contextlib.nullcontext() if replica is None else tf.device(replica.device)


def _tied(
    variable: Any, value: tf.Tensor, indices: tf.Tensor | None = None
) -> tf.Tensor:
    """Routes the gradient of a read value to the variable's handle."""
    replica = context.current()
    if not (value.dtype.is_floating or value.dtype.is_complex):
        return value
    if replica is not None and replica.mode.updating:
        return value  # read by an optimizer; nobody differentiates its updates
    shape = variable.shape
    if tf.executing_eagerly():
        with tapes.stop_recording():
            result = tf.identity(value)
        return _recorded(variable.handle, result, indices, shape)
    graph: Any = tf.compat.v1.get_default_graph()
    source = variable.handle
    around = control_flow.around_loops(graph)
    if around is not None:
        source = _stand_in(variable, around)
    with _here():
        return tf.identity(_tie(graph, source, value, indices, shape))


def _stand_in(variable: Any, around: tf.Graph) -> tf.Tensor:
    """Returns a tensor that represents a variable inside a loop.

    A loop's gradient sums what belongs to a resource from outside the loop, and asks
    the resource for its size at run time. This tensor has the variable's shape, and a
    gradient that goes to the variable. In a step it takes no memory: see
    graph/passes/ties.py.

    Args:
        variable: The variable.
        around: The graph around the loop.
    """
    with around.as_default(), tf.control_dependencies(None), tf.name_scope("parts"):
        zeros = tf.zeros(variable.shape, variable.dtype)
        result = _tie(around, variable.handle, zeros, None, variable.shape)
    ops.set_text_attr(result.op, PLACEHOLDER_VARIABLE, PLACEHOLDER_VARIABLE)
    return result


def _tie(
    graph: Any,
    source: tf.Tensor,
    value: tf.Tensor,
    indices: tf.Tensor | None,
    shape: tf.TensorShape,
) -> tf.Tensor:
    """Adds a tie to a graph and returns its output, which equals the value.

    Args:
        graph: The default graph.
        source: Where gradients go: the variable's handle, or what represents it.
        value: The value that was read.
        indices: The rows that were read; None for all.
        shape: The variable's shape.
    """
    if graph.building_function:  # before recording stops: tapes have to see it
        source = graph.capture(source)
    inputs = [value, source] if indices is None else [value, source, indices]
    with (
        tapes.stop_recording(),
        graph.gradient_override_map({"IdentityN": GRADIENT_TYPE}),
    ):
        result = tf.raw_ops.IdentityN(input=inputs)[0]
    if source.dtype == tf.resource:
        ops.set_read_only_inputs(result.op, [1])  # else functions count it as a write
    result.set_shape(value.shape)
    return _recorded(source, result, indices, shape)


def _recorded(
    source: tf.Tensor,
    result: tf.Tensor,
    indices: tf.Tensor | None,
    shape: tf.TensorShape,
) -> tf.Tensor:
    """Makes tapes send the gradient of a read value to `source`."""
    tapes.record_gradient(
        "parts", [result], [source], lambda d: [_gradient(d, indices, shape)]
    )
    return result


def _gradient(
    upstream: Any, indices: tf.Tensor | None, shape: tf.TensorShape
) -> tf.Tensor | tf.IndexedSlices:
    """Returns the gradient of the whole: dense, or of the rows that were read."""
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
    """The gradient that tf.gradients uses; tapes use what `_recorded` set."""
    if upstream[0] is None:
        return [None] * len(op.inputs)
    indices = op.inputs[2] if len(op.inputs) > 2 else None
    source = op.inputs[1]
    resource = source.dtype == tf.resource
    shape = ops.resource_shape(source) if resource else source.shape
    gradient = _gradient(upstream[0], indices, shape)
    return [None, gradient, *([] if indices is None else [None])]
