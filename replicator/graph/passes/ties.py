# SPDX-License-Identifier: Apache-2.0
"""Removes the ops that tie reads of a partitioned variable to its handle.

A partitioned variable is read by reading its parts. The value is tied to the variable's
handle by an op whose gradient goes to the handle; see variables/joining.py. Once all
replicas are built, no more gradients are computed: each tie is replaced by the value
that it ties, and a placeholder for a variable in a loop by one number. Ties inside
functions stay, and do nothing there.

Where rows are gathered from joined parts, they are gathered from each part instead, and
only rows are joined. Ops that use the value of the handle itself, which does not exist,
are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

import tensorflow as tf

from replicator import errors
from replicator._tf import functions, graphs
from replicator._tf import ops as tf_ops
from replicator.graph.ir import shapes
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import kind_of, resource_inputs
from replicator.graph.passes import rows

GRADIENT_TYPE = "ReplicatorParts"
PLACEHOLDER_VARIABLE = "_replicator_placeholder_variable"  # an attribute of ties
_TRANSPARENT = ("Identity", "Cast")
_LOOPS = ("While", "StatelessWhile")


def is_tie(op: tf.Operation) -> bool:
    """Whether an op ties a read of a partitioned variable to its handle."""
    return op.type == "IdentityN" and _has(op, "_gradient_op_type", GRADIENT_TYPE)


def _has(op: tf.Operation, name: str, text: str) -> bool:
    try:
        return bool(op.get_attr(name) == text.encode())
    except ValueError:
        return False


def resolve(
    replicas: Sequence[Sequence[tf.Operation]],
    replica_ids: Sequence[int],
    results: Sequence[tf.Tensor],
    handles: Mapping[int, Any],
    initializers: Set[tf.Operation],
) -> list[list[tf.Operation]]:
    """Removes the ties of a step.

    Args:
        replicas: `replicas[n]` are the ops of `replica_ids[n]`, in build order.
        replica_ids: The replicas.
        results: The results of the step.
        handles: The partitioned variables, by the ids of their handles.
        initializers: Ops that initialize variables, which are not part of the step.

    Returns:
        The ops of each replica, without ties and with the ops that replace them.

    Raises:
        UnsupportedError: An op reads or writes the value of such a handle.
    """
    if not handles:
        return [list(ops) for ops in replicas]
    result_ops = {tensor.op for tensor in results}
    outermost = Captures().outermost

    def variable_of(tensor: tf.Tensor) -> Any:
        while tensor.op.type in (*_LOOPS, "Identity"):  # which pass it on
            tensor = tensor.op.inputs[tensor.value_index]
        return handles.get(id(outermost(tensor)))

    untied = []
    for replica_id, ops in zip(replica_ids, replicas, strict=True):
        replica_ops = _untied(ops, result_ops, initializers)
        for op in replica_ops:
            if op in initializers:
                continue
            for user, variable in _uses_of_value(op, variable_of):
                if user is op and user.type == "VariableShape":
                    _replace_shape(op, variable)
                elif user.type != "VariableShape" or _is_used(user):
                    _refuse(user, variable, replica_id)
        untied.append(replica_ops)
    return untied


def _uses_of_value(
    op: tf.Operation, variable_of: Callable[[tf.Tensor], Any]
) -> Iterator[tuple[tf.Operation, Any]]:
    """Yields (op, variable) for each use of a handle's own value, at any depth.

    Args:
        op: An op of the step.
        variable_of: Returns the partitioned variable that a resource is, or None.
    """
    if kind_of(op).calls:
        if any(t.dtype == tf.resource for t in op.inputs):
            for _, body in functions.called_graphs(op):
                for inner in body.get_operations():
                    yield from _uses_of_value(inner, variable_of)
        return
    if is_tie(op):
        return
    for _, tensor in resource_inputs(op):
        variable = variable_of(tensor)
        if variable is not None:
            yield op, variable


def _is_used(op: tf.Operation) -> bool:
    """Whether an op of a function has a consumer, or returns its value."""
    (value,) = op.outputs
    graph: Any = op.graph
    return bool(value.consumers()) or any(value is output for output in graph.outputs)


def _replace_shape(op: tf.Operation, variable: Any) -> None:
    """Replaces a shape by the variable's, which cannot be found at run time."""
    with tf.control_dependencies(None), tf.device(None), tf.device(op.device):
        shape = tf.constant(variable.shape.as_list(), op.outputs[0].dtype)
    tf_ops.replace(op.outputs[0], shape)


def _refuse(op: tf.Operation, variable: Any, replica_id: int) -> NoReturn:
    raise errors.UnsupportedError(
        f"replica {replica_id} accesses the value of variable {variable.name} by "
        f"{op.type}, but the variable {variable.how_split}.",
        [f"at {errors.line_of(op)}"],
        "use the variable's own methods, or an optimizer that does; or a strategy that "
        "leaves this variable whole.",
    )


def _untied(
    ops: Sequence[tf.Operation],
    result_ops: Set[tf.Operation],
    initializers: Set[tf.Operation],
) -> list[tf.Operation]:
    """Returns a replica's ops without ties; rows are gathered from parts."""
    ties = [op for op in ops if is_tie(op) and op not in initializers]
    if not ties:
        return list(ops)
    joins: dict[tf.Operation, None] = {}
    added: dict[tf.Operation, list[tf.Operation]] = {}
    for tie in ties:
        value = tie.inputs[0]
        if _has(tie, PLACEHOLDER_VARIABLE, PLACEHOLDER_VARIABLE):
            value = _any_shape_zero(value.dtype, tie.device)
            added[tie] = [value.op.inputs[0].op, value.op]
            _materialize_zeros(tie.outputs[0], added)
        elif value.op.type == "ConcatV2":
            joins[value.op] = None
        tf_ops.replace(tie.outputs[0], value)
        tf_ops.move_control_outputs(tie, value.op)
    removed = set(ties)
    for join in joins:
        _gather_from_parts(join, result_ops, added, removed)
    tf_ops.abandon(list(removed))
    new_ops: list[tf.Operation] = []
    for op in ops:
        new_ops += added.get(op, [])
        if op not in removed:
            new_ops.append(op)
    return new_ops


def _materialize_zeros(
    placeholder: tf.Tensor, added: dict[tf.Operation, list[tf.Operation]]
) -> None:
    """Gives a static shape to the initial zeros of gradients of a loop's placeholder.

    Args:
        placeholder: A placeholder for a variable, which is about to become one number.
        added: Receives the ops that replace an op.
    """
    for loop in placeholder.consumers():
        if loop.type not in _LOOPS:
            continue
        for index, tensor in enumerate(loop.inputs):
            if tensor is not placeholder:
                continue
            for op in loop.outputs[index].consumers():
                if op.type == "ZerosLike":
                    added[op] = _zeros_for(op, placeholder.shape)


def _zeros_for(op: tf.Operation, shape: tf.TensorShape) -> list[tf.Operation]:
    """Replaces a ZerosLike by zeros of a known shape; returns the new ops."""
    start = graphs.operation_count(op.graph)
    with tf.control_dependencies(None), tf.device(None), tf.device(op.device):
        zeros = tf.zeros(shape, op.outputs[0].dtype)
    tf_ops.replace(op.outputs[0], zeros)
    return list(op.graph.get_operations()[start:])


@dataclasses.dataclass(frozen=True)
class _Gather:
    """A gather of rows from joined parts.

    Attributes:
        op: The gather.
        casts: The casts and identities between the join and the gather, in order.
    """

    op: tf.Operation
    casts: tuple[tf.Operation, ...]


def _gather_from_parts(
    join: tf.Operation,
    result_ops: Set[tf.Operation],
    added: dict[tf.Operation, list[tf.Operation]],
    removed: set[tf.Operation],
) -> None:
    """Gathers from the parts rather than from their join.

    Args:
        join: The op that concatenates the parts.
        result_ops: Ops whose results leave the step.
        added: Receives the ops that replace an op.
        removed: Receives the ops that are no longer needed.
    """
    uses = _uses(join, result_ops, ())
    part_reads = [_read_of(tensor) for tensor in list(join.inputs)[:-1]]
    reads = [read for read in part_reads if read is not None]
    if uses is None or len(reads) < len(part_reads):
        return
    for use in uses:
        if use.op not in added:
            added[use.op] = _gather_of_parts(join, reads, use)
            removed.add(use.op)
    between = _between(join)
    removed |= {join, *between}
    nothing = _any_shape_zero(reads[0].dtype, join.device)
    for tensor in list(join.inputs)[:-1]:
        if tensor.op.type == "Identity" and len(tensor.consumers()) == 1:
            removed.add(tensor.op)
    for op in [join, *(t.op for t in list(join.inputs)[:-1])]:
        for index, tensor in enumerate(list(op.inputs)):
            # A removed op keeps its inputs, and would keep the read running.
            if op in removed and tensor.op.type == "ReadVariableOp":
                tf_ops.set_input(op, index, nothing)


def _any_shape_zero(dtype: tf.DType, device: str) -> tf.Tensor:
    """Returns a number that can replace a tensor of any shape."""
    with tf.control_dependencies(None), tf.device(None), tf.device(device):
        return tf.raw_ops.PlaceholderWithDefault(
            input=tf.constant(0, dtype), shape=tf.TensorShape(None)
        )


def _uses(
    op: tf.Operation, result_ops: Set[tf.Operation], casts: tuple[tf.Operation, ...]
) -> list[_Gather] | None:
    """Returns the gathers of rows of an op's result; None if anything else uses it."""
    if op in result_ops or tf_ops.control_outputs(op):
        return None
    gathers: list[_Gather] = []
    for consumer in op.outputs[0].consumers():
        if is_tie(consumer):  # already replaced
            continue
        if consumer.type in _TRANSPARENT:
            inner_gathers = _uses(consumer, result_ops, (*casts, consumer))
            if inner_gathers is None:
                return None
            gathers += inner_gathers
        elif (
            consumer.type == "GatherV2"
            and consumer.inputs[0].op is op
            and rows.gathers_rows(consumer)
        ):
            gathers.append(_Gather(consumer, casts))
        else:
            return None
    return gathers


def _between(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that pass on an op's result, at any depth."""
    ops = []
    for consumer in op.outputs[0].consumers():
        if consumer.type in _TRANSPARENT:
            ops += [consumer, *_between(consumer)]
    return ops


def _read_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the read of a part, if only identities are between it and the tensor."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor if tensor.op.type == "ReadVariableOp" else None


def _gather_of_parts(
    join: tf.Operation, reads: Sequence[tf.Tensor], use: _Gather
) -> list[tf.Operation]:
    """Gathers rows from each part, and joins them; returns the new ops."""
    old, indices = use.op.outputs[0], use.op.inputs[1]
    axis = int(tf.get_static_value(join.inputs[len(reads)]))
    layout = rows.Parts(axis, tuple(shapes.defined(read)[axis] for read in reads))
    graph = join.graph
    start = graphs.operation_count(graph)

    def reader(read: tf.Tensor) -> rows.Reader:
        def gather(local: tf.Tensor) -> tf.Tensor:
            with tf.device(None), tf.device(read.op.device or use.op.device):
                return tf.raw_ops.GatherV2(params=read, indices=local, axis=0)

        return gather

    with (
        tf.control_dependencies(None),
        tf.control_dependencies(use.op.control_inputs),
        tf.device(None),
        tf.device(use.op.device),
        tf.name_scope(f"{use.op.name}/rows/"),
    ):
        value = layout.rows([reader(read) for read in reads], indices)
        for cast in use.casts:
            value = tf.cast(value, cast.outputs[0].dtype)
        value = tf.identity(value)
    value.set_shape(old.shape)
    tf_ops.replace(old, value)
    tf_ops.move_control_outputs(use.op, value.op)
    return list(graph.get_operations()[start:])
