# SPDX-License-Identifier: Apache-2.0
"""Rules that replace ops on a variable when it is partitioned.

Reads join the parts, lookups go to the parts that hold the rows, updates and other
writes are per part; conditionals and loops are passed all parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import bodies_of_parts, uses
from replicator.autodist.pieces import repeated
from replicator.autodist.rewriting import Handles, Rewriter, joined
from replicator.autodist.slots import UPDATES
from replicator.graph.passes import rows

Rule = Callable[[Rewriter, tf.Operation, Handles], tf.Operation | None]


def divide(made: Rewriter, op: tf.Operation) -> tf.Operation | None:
    """Returns the replacement of an op; None if the rule has registered its results.

    Args:
        made: The rewriter of the graph.
        op: An op that uses a partitioned variable.
    """
    handles = made.handles_of(op)
    assert handles is not None, f"{op.name} of {op.type} uses parts"
    for pattern, rule in _RULES:
        if pattern.fullmatch(op.type):
            return rule(made, op, handles)
    raise AssertionError(f"{op.type} was taken to use parts")


def _named(op: tf.Operation, value: tf.Tensor) -> tf.Operation:
    """Returns an identity of a value under the name of an op."""
    with tf.name_scope(""):
        passed: tf.Tensor = tf.identity(value, name=op.name)
    return passed.op


def _all(op: tf.Operation, done: list[tf.Operation]) -> tf.Operation:
    """Returns a group of ops under the name of an op."""
    with tf.name_scope(""):
        group: tf.Operation = tf.group(*done, name=op.name)
    return group


# --- Reading --------------------------------------------------------------------------


def _joined(
    made: Rewriter,
    handles: Handles,
    dtype: tf.DType,
    name: str | None = None,
    after: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
    """Returns the value of a whole variable, registered as the join of its parts.

    Args:
        made: The rewriter of the graph.
        handles: The handles of the parts.
        dtype: The variable's dtype.
        name: The name of the op that joins them.
        after: Tensors to wait for before reading: the other inputs of the op that
            reads, through which it may follow a write.
    """
    with tf.control_dependencies([tf.identity(tensor).op for tensor in after]):
        part_values = [
            tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype) for h in handles.parts
        ]
    value = joined(part_values, handles.cut, name)
    made.pieces.note(value, handles.cut, part_values)
    return value


def _read(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    return _joined(made, handles, op.outputs[0].dtype, op.name).op


def _gather(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    cut, dtype = handles.cut, op.outputs[0].dtype
    indices = made.tensor(op.inputs[1])
    batch_dims = op.get_attr("batch_dims")
    if batch_dims:
        value = _joined(made, handles, dtype, after=[indices])
        return _named(op, tf.gather(value, indices, batch_dims=batch_dims))

    def reader(handle: tf.Tensor) -> rows.Reader:
        return lambda own: tf.raw_ops.ResourceGather(
            resource=handle, indices=own, dtype=dtype
        )

    value = rows.gathered(
        [reader(h) for h in handles.parts], indices, cut.axis, cut.sizes
    )
    value.set_shape(indices.shape.concatenate(cut.shape[1:]))
    return _named(op, value)


def _gather_nd(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    indices = made.tensor(op.inputs[1])
    value = _joined(made, handles, op.outputs[0].dtype, after=[indices])
    return _named(op, tf.gather_nd(value, indices))


def _shape(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    with tf.name_scope(""):
        shape = tf.constant(handles.cut.shape, op.outputs[0].dtype, name=op.name)
    return shape.op


def _is_initialized(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    are_initialized = [tf.raw_ops.VarIsInitializedOp(resource=h) for h in handles.parts]
    return _named(op, tf.reduce_all(tf.stack(are_initialized)))


# --- Writing --------------------------------------------------------------------------


def _assign(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    value = made.tensor(op.inputs[1])
    return _write(made, op, handles, value, getattr(tf.raw_ops, op.type))


def _write(
    made: Rewriter, op: tf.Operation, handles: Handles, value: tf.Tensor, write: Any
) -> tf.Operation:
    cut = handles.cut
    if op in made.whole or not value.shape.is_fully_defined():
        value = tf.ensure_shape(value, cut.shape)
        made.values[op] = value.op
        pieces = tf.split(value, cut.sizes, cut.axis)
    else:
        pieces = made.pieces.of(value, cut)
    start = _tf.operation_count(made.target)
    for handle, piece in zip(handles.parts, pieces, strict=True):
        write(resource=handle, value=piece)
    writes = made.target.get_operations()[start:]
    return _all(op, writes)


def _update(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    """Updates each part with its piece of the gradient and its slots."""
    cut = handles.cut
    names = [argument.name for argument in op.op_def.input_arg]
    inputs_by_name = dict(zip(names, op.inputs, strict=True))
    columns: dict[str, list[tf.Tensor]] = {}
    for name, tensor in inputs_by_name.items():
        part_handles = made.handles.get(id(tensor))
        columns[name] = (
            list(part_handles.parts)
            if part_handles is not None
            else [made.tensor(tensor)] * len(cut.sizes)
        )
    key = "grad" if "grad" in inputs_by_name else "delta"
    gradient = made.tensor(inputs_by_name[key])
    if "indices" in inputs_by_name:
        part_rows = made.pieces.rows_of(
            gradient, made.tensor(inputs_by_name["indices"]), cut
        )
        columns[key] = [values for values, _ in part_rows]
        columns["indices"] = [indices for _, indices in part_rows]
    else:
        columns[key] = made.pieces.of(gradient, cut)
    inputs = zip(*(columns[name] for name in names), strict=True)
    return _all(op, [repeated(op, part_inputs, op.type) for part_inputs in inputs])


def _scatter(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    """Writes rows, each to the part that holds it."""
    cut = handles.cut
    indices, updates = (made.tensor(tensor) for tensor in op.inputs[1:])
    rank = indices.shape.rank
    if updates.shape.rank == 0:
        owners = rows.owners_of(tf.reshape(indices, [-1]), cut.sizes)
        places = [indices] * len(cut.sizes)
        if not cut.axis:
            flat = tf.reshape(indices, [-1])
            places = rows.local_rows(flat, owners, cut.sizes)
        part_rows = [(updates, part_places) for part_places in places]
    else:
        if rank != 1:
            indices = tf.reshape(indices, [-1])
            updates = tf.reshape(updates, [-1, *cut.shape[1:]])
        part_rows = made.pieces.rows_of(updates, indices, cut)
    writes = [
        repeated(op, [handle, places, values], op.type)
        for handle, (values, places) in zip(handles.parts, part_rows, strict=True)
    ]
    return _all(op, writes)


def _write_places(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    """Writes the whole value, recomputed with some places changed."""
    tensors = [made.tensor(tensor) for tensor in op.inputs[1:]]
    value = _joined(made, handles, tensors[-1].dtype, after=tensors)
    if op.type == "ResourceStridedSliceAssign":
        masks = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
        mask_attributes = {
            f"{mask}_mask": op.get_attr(f"{mask}_mask") for mask in masks
        }
        begin, end, strides, written = tensors
        value = tf.raw_ops.TensorStridedSliceUpdate(
            input=value,
            begin=begin,
            end=end,
            strides=strides,
            value=written,
            **mask_attributes,
        )
    else:
        method = op.type.removeprefix("ResourceScatterNd")
        write = getattr(tf.raw_ops, f"TensorScatter{method}")
        value = write(tensor=value, indices=tensors[0], updates=tensors[1])
    return _write(made, op, handles, value, tf.raw_ops.AssignVariableOp)


# --- Control flow ---------------------------------------------------------------------


def _pass_on(made: Rewriter, op: tf.Operation, handles: Handles) -> None:
    """Passes on each part as the op did the whole."""
    if op.type == "Identity":
        made.divide(op.outputs[0], handles)
        return
    others = [made.tensor(tensor) for tensor in op.inputs[1:]]
    part_ops = [repeated(op, [handle, *others], op.type) for handle in handles.parts]
    for k, tensor in enumerate(op.outputs):
        part_results = tuple(part_op.outputs[k] for part_op in part_ops)
        for handle, result in zip(handles.parts, part_results, strict=True):
            _tf.copy_handle_data(handle, result)
        pivot = tf.identity(part_results[0]).op
        made.divide(tensor, Handles(handles.cut, part_results, pivot))


def _call(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    return bodies_of_parts.call(made, op, divide)


_RULES: tuple[tuple[re.Pattern[str], Rule], ...] = tuple(
    (re.compile(pattern), rule)
    for pattern, rule in (
        ("ReadVariableOp", _read),
        ("ResourceGather", _gather),
        ("ResourceGatherNd", _gather_nd),
        ("VariableShape", _shape),
        ("VarIsInitializedOp", _is_initialized),
        ("Assign(Add|Sub)?VariableOp", _assign),
        (UPDATES.pattern, _update),
        ("ResourceScatter(Add|Sub|Update|Max|Min|Mul|Div)", _scatter),
        ("ResourceScatterNd(Add|Sub|Update|Max|Min)", _write_places),
        ("ResourceStridedSliceAssign", _write_places),
        ("|".join(uses.PASSED_ON), _pass_on),
        ("|".join(uses.CALLS), _call),
    )
)
