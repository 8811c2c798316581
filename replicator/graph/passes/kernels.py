# SPDX-License-Identifier: Apache-2.0
"""Reorders products of few rows with a large transposed matrix, on CPUs.

Every dense layer's gradient with respect to its inputs, dy W^T, is such a product.
TensorFlow's CPU kernel first packs the transposed matrix, element by element, whatever
the number of rows; dividing a batch among replicas does not reduce that cost for any of
them. (W dy^T)^T is the same product, up to rounding, without the packing.

Measured speedup with 2 cores, TensorFlow 2.21: W 512 x 512, 16 to 128 rows: 1.4 to 2.4;
2048 x 2048, 16 to 512 rows: 6 to 1.7; 512 x 512 with 512 rows: 0.7; 256 x 256: 0.8 to
0.9; 256 x 1024 with 32 rows: 2.3. So the matrix must be large and the rows
comparatively few. It pays off with and without oneDNN. Where the number of rows is
unknown, as in a step for batches of any size, the step decides when it runs, in 5 us;
not in a loop, where deciding in each iteration costs more (an LSTM's step: 7%).

Runs once all replicas are built and their communication is lowered. A recurrent network
has such a product in each iteration of a loop: an op that calls a function with one
gets a modified copy of the function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import functions
from replicator._tf import ops as tf_ops
from replicator.graph.ir import shapes
from replicator.graph.lowering import inline
from replicator.graph.matching.control_flow import CONSTRUCTS

_DTYPES = (tf.float32, tf.float64)
_LARGE = 512 * 512  # elements of the matrix
_FEW = 4  # the least ratio of the matrix's shorter side to the number of rows


def replace(replicas: Sequence[Sequence[tf.Operation]]) -> int:
    """Replaces all such products in a step.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph.

    Returns:
        The number of products replaced.
    """
    # Merged ops are listed for every replica; each is replaced once.
    return _replace(dict.fromkeys(op for ops in replicas for op in ops), "", {})


def _replace(
    ops: Iterable[tf.Operation],
    device: str,
    replaced_in: dict[Any, tuple[str, int]],
    may_ask: bool = True,
) -> int:
    """Replaces products among ops, and in the functions that they call.

    Args:
        ops: The ops.
        device: The device of ops that have none: that of their caller.
        replaced_in: The new functions, and their numbers of new products, by the graphs
            of the functions so far and the type of the devices.
        may_ask: Whether the step may decide where the number of rows is unknown.
    """
    replaced = 0
    for op in ops:
        if _pays(op, device, may_ask):
            _replace_one(op)
            replaced += 1
        elif op.type in CONSTRUCTS:
            replaced += _replace_inside(op, op.device or device, replaced_in, may_ask)
    return replaced


def _pays(op: tf.Operation, device: str, may_ask: bool) -> bool:
    """Whether an op multiplies few rows by a large transposed matrix, on a CPU."""
    return (
        op.type == "MatMul"
        and op.outputs[0].dtype in _DTYPES
        and tf.DeviceSpec.from_string(op.device or device).device_type == "CPU"
        and op.get_attr("transpose_b")
        and not op.get_attr("transpose_a")
        and _is_large_for_its_rows(op, may_ask)
    )


def _is_large_for_its_rows(op: tf.Operation, may_ask: bool) -> bool:
    """Whether the matrix is large; the number of rows may be known only at run time."""
    if not op.inputs[1].shape.is_fully_defined() or op.inputs[0].shape.rank is None:
        return False
    matrix, rows = shapes.defined(op.inputs[1]), shapes.size(op.inputs[0], 0)
    if math.prod(matrix) < _LARGE or (rows is None and not may_ask):
        return False
    return _FEW * (rows or 0) <= min(matrix)


def _replace_one(op: tf.Operation) -> None:
    rows, matrix = op.inputs

    def product() -> tf.Tensor:
        return tf.linalg.matmul(rows, matrix, transpose_b=True)

    def transposed() -> tf.Tensor:
        return tf.transpose(tf.linalg.matmul(matrix, rows, transpose_b=True))

    with (
        tf.control_dependencies(None),
        tf.control_dependencies(op.control_inputs),
        tf.device(None),
        tf.device(op.device),
    ):
        if shapes.size(rows, 0) is None:
            is_small = _FEW * tf.shape(rows)[0] <= min(shapes.defined(matrix))
            result = tf.cond(is_small, transposed, product)
        else:
            result = transposed()
    tf_ops.replace(op.outputs[0], result)
    tf_ops.move_control_outputs(op, result.op)


def _replace_inside(
    op: tf.Operation,
    device: str,
    replaced_in: dict[Any, tuple[str, int]],
    may_ask: bool,
) -> int:
    """Gives a conditional, loop or call modified copies of the functions it calls."""
    replaced = 0
    may_ask = may_ask and not _is_loop(op)
    for attribute, position in functions.functions_called(op):
        body, outputs = functions.function_body(op, attribute, position)
        key = body, op.graph, tf.DeviceSpec.from_string(device).device_type, may_ask
        ops = body.get_operations()
        if key not in replaced_in and _any_pays(ops, device, may_ask):
            new = functions.new_function_graph("kernels")
            arguments = functions.add_inputs(
                new, body.inputs, [t.shape for t in body.inputs]
            )
            with new.as_default():
                copy = inline.copy(body, outputs, arguments, "body")
                count = _replace(copy.ops, device, replaced_in, may_ask)
            name = functions.finish_function(new, copy.results, copy.must_run)
            replaced_in[key] = name, count
        if key in replaced_in:
            name, count = replaced_in[key]
            functions.set_function(op, attribute, position, name)
            replaced += count
    return replaced


def _any_pays(ops: Iterable[tf.Operation], device: str, may_ask: bool) -> bool:
    """Whether any of these ops, or one in what they call, should be replaced."""
    return any(
        _pays(op, device, may_ask)
        or (
            op.type in CONSTRUCTS
            and any(
                _any_pays(body, op.device or device, may_ask and not _is_loop(op))
                for body in _bodies(op)
            )
        )
        for op in ops
    )


def _is_loop(op: tf.Operation) -> bool:
    return CONSTRUCTS[op.type] == "loop"


def _bodies(op: tf.Operation) -> list[list[tf.Operation]]:
    called = functions.functions_called(op)
    return [functions.function_body(op, *place)[0].get_operations() for place in called]
