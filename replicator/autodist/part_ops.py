# SPDX-License-Identifier: Apache-2.0
"""What is in the place of an op that uses a variable, once that is in parts.

Reads join the parts, lookups go to the parts that have the rows, updates and whatever
is written are made part by part; a conditional or a loop is given all parts.
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
    """Returns what is in the place of an op; None if that says what has become of it.

    Args:
        made: Copies the graph.
        op: Uses what is divided.
    """
    handles = made.handles_of(op)
    assert handles is not None, f"{op.name} of {op.type} uses parts"
    for pattern, rule in _RULES:
        if pattern.fullmatch(op.type):
            return rule(made, op, handles)
    raise AssertionError(f"{op.type} was taken to use parts")


def _named(op: tf.Operation, value: tf.Tensor) -> tf.Operation:
    """Returns what passes on a value under the name of an op."""
    with tf.name_scope(""):
        passed: tf.Tensor = tf.identity(value, name=op.name)
    return passed.op


def _all(op: tf.Operation, done: list[tf.Operation]) -> tf.Operation:
    """Returns what runs when all of some ops have run, under the name of an op."""
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
    """Returns the whole value of a variable, noted to be what its parts are.

    Args:
        made: Copies the graph.
        handles: Of the parts.
        dtype: Of the variable.
        name: What the op is called that joins them.
        after: What is there before they are read: what the op is given that reads them,
            by which it may be behind a write.
    """
    with tf.control_dependencies([tf.identity(tensor).op for tensor in after]):
        own = [
            tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype) for h in handles.parts
        ]
    value = joined(own, handles.cut, name)
    made.pieces.note(value, handles.cut, own)
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
    own = [tf.raw_ops.VarIsInitializedOp(resource=h) for h in handles.parts]
    return _named(op, tf.reduce_all(tf.stack(own)))


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
        own = tf.split(value, cut.sizes, cut.axis)
    else:
        own = made.pieces.of(value, cut)
    start = _tf.operation_count(made.target)
    for handle, piece in zip(handles.parts, own, strict=True):
        write(resource=handle, value=piece)
    done = made.target.get_operations()[start:]
    return _all(op, done)


def _update(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    """Updates each part, by what belongs to it of the gradient and the slots."""
    cut = handles.cut
    names = [argument.name for argument in op.op_def.input_arg]
    given = dict(zip(names, op.inputs, strict=True))
    columns: dict[str, list[tf.Tensor]] = {}
    for name, tensor in given.items():
        known = made.handles.get(id(tensor))
        columns[name] = (
            list(known.parts)
            if known is not None
            else [made.tensor(tensor)] * len(cut.sizes)
        )
    key = "grad" if "grad" in given else "delta"
    gradient = made.tensor(given[key])
    if "indices" in given:
        found = made.pieces.rows_of(gradient, made.tensor(given["indices"]), cut)
        columns[key] = [values for values, _ in found]
        columns["indices"] = [indices for _, indices in found]
    else:
        columns[key] = made.pieces.of(gradient, cut)
    inputs = zip(*(columns[name] for name in names), strict=True)
    return _all(op, [repeated(op, own, op.type) for own in inputs])


def _scatter(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    """Writes rows, each to the part that has it."""
    cut = handles.cut
    indices, updates = (made.tensor(tensor) for tensor in op.inputs[1:])
    rank = indices.shape.rank
    if updates.shape.rank == 0:
        owners = rows.owners_of(tf.reshape(indices, [-1]), cut.sizes)
        places = [indices] * len(cut.sizes)
        if not cut.axis:
            flat = tf.reshape(indices, [-1])
            places = rows.local_rows(flat, owners, cut.sizes)
        found = [(updates, own) for own in places]
    else:
        if rank != 1:
            indices = tf.reshape(indices, [-1])
            updates = tf.reshape(updates, [-1, *cut.shape[1:]])
        found = made.pieces.rows_of(updates, indices, cut)
    done = [
        repeated(op, [handle, places, values], op.type)
        for handle, (values, places) in zip(handles.parts, found, strict=True)
    ]
    return _all(op, done)


def _write_places(made: Rewriter, op: tf.Operation, handles: Handles) -> tf.Operation:
    """Writes what the whole value is once some places of it are written."""
    tensors = [made.tensor(tensor) for tensor in op.inputs[1:]]
    value = _joined(made, handles, tensors[-1].dtype, after=tensors)
    if op.type == "ResourceStridedSliceAssign":
        masks = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
        own = {f"{mask}_mask": op.get_attr(f"{mask}_mask") for mask in masks}
        begin, end, strides, written = tensors
        value = tf.raw_ops.TensorStridedSliceUpdate(
            input=value, begin=begin, end=end, strides=strides, value=written, **own
        )
    else:
        method = op.type.removeprefix("ResourceScatterNd")
        write = getattr(tf.raw_ops, f"TensorScatter{method}")
        value = write(tensor=value, indices=tensors[0], updates=tensors[1])
    return _write(made, op, handles, value, tf.raw_ops.AssignVariableOp)


# --- Control flow ---------------------------------------------------------------------


def _pass_on(made: Rewriter, op: tf.Operation, handles: Handles) -> None:
    """Passes on each part as the whole was."""
    if op.type == "Identity":
        made.divide(op.outputs[0], handles)
        return
    others = [made.tensor(tensor) for tensor in op.inputs[1:]]
    new = [repeated(op, [handle, *others], op.type) for handle in handles.parts]
    for k, tensor in enumerate(op.outputs):
        own = tuple(one.outputs[k] for one in new)
        for handle, result in zip(handles.parts, own, strict=True):
            _tf.copy_handle_data(handle, result)
        pivot = tf.identity(own[0]).op
        made.divide(tensor, Handles(handles.cut, own, pivot))


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
