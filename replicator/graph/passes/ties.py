# SPDX-License-Identifier: Apache-2.0
"""Takes out of a step what tied variables in parts to their handles, for gradients.

A variable in parts is read by reading these. What is read is tied to the variable's
handle by an op whose gradient goes to the handle; see variables/joining.py. Once all
replicas are built, no gradient is taken any more: a tie gives way to what it ties, and
a tensor that stood for a variable in a loop to one number. Ties inside of functions
stay, and do nothing there.

Where rows are gathered of parts that were joined, each part gathers its own, and only
rows are joined. What reaches for the value behind the handle, where there is none, is
refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NoReturn

import tensorflow as tf

from replicator import _tf, errors
from replicator.graph.ir import shapes
from replicator.graph.ir.captures import Captures
from replicator.graph.ir.kinds import kind_of, resource_inputs
from replicator.graph.passes import rows

GRADIENT_TYPE = "ReplicatorParts"
STAND_IN = "_replicator_stand_in"  # an attribute of ties
_TRANSPARENT = ("Identity", "Cast")
_LOOPS = ("While", "StatelessWhile")


def is_tie(op: tf.Operation) -> bool:
    """Whether an op ties what is read of a variable in parts to its handle."""
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
    """Takes the ties out of a step.

    Args:
        replicas: `replicas[n]` are the ops of `replica_ids[n]`, in build order.
        replica_ids: The replicas.
        results: What the step returns.
        handles: The variables in parts, by the ids of their handles.
        initializers: Ops that initialise variables, which are no part of the step.

    Returns:
        The ops of each replica, without ties, and with what is in their places.

    Raises:
        UnsupportedError: An op reads or writes what is behind such a handle.
    """
    if not handles:
        return [list(ops) for ops in replicas]
    kept = {tensor.op for tensor in results}
    outermost = Captures().outermost

    def variable_of(tensor: tf.Tensor) -> Any:
        while tensor.op.type in (*_LOOPS, "Identity"):  # which hand it on
            tensor = tensor.op.inputs[tensor.value_index]
        return handles.get(id(outermost(tensor)))

    made = []
    for replica_id, ops in zip(replica_ids, replicas, strict=True):
        own = _untied(ops, kept, initializers)
        for op in own:
            if op in initializers:
                continue
            for op_of_it, variable in _uses_of_value(op, variable_of):
                if op_of_it.type != "VariableShape":
                    _refuse(op_of_it, variable, replica_id)
                elif op_of_it is op:
                    _replace_shape(op, variable)
        made.append(own)
    return made


def _uses_of_value(
    op: tf.Operation, variable_of: Callable[[tf.Tensor], Any]
) -> Iterator[tuple[tf.Operation, Any]]:
    """Yields (op, variable) for what uses the value behind a handle, to any depth.

    Args:
        op: Of the step.
        variable_of: Returns the variable in parts that a resource is, or None.
    """
    if kind_of(op).calls:
        if any(t.dtype == tf.resource for t in op.inputs):
            for _, body in _tf.called_graphs(op):
                for inner in body.get_operations():
                    yield from _uses_of_value(inner, variable_of)
        return
    if is_tie(op):
        return
    for _, tensor in resource_inputs(op):
        variable = variable_of(tensor)
        if variable is not None:
            yield op, variable


def _replace_shape(op: tf.Operation, variable: Any) -> None:
    """Says what shape a variable has, which nothing at run time knows."""
    with tf.control_dependencies(None), tf.device(None), tf.device(op.device):
        shape = tf.constant(variable.shape.as_list(), op.outputs[0].dtype)
    _tf.replace(op.outputs[0], shape)


def _refuse(op: tf.Operation, variable: Any, replica_id: int) -> NoReturn:
    raise errors.UnsupportedError(
        errors.compose(
            f"replica {replica_id} reaches for the value of variable {variable.name} "
            f"by {op.type}, but the variable is in {len(variable.parts)} parts.",
            [f"at {errors.line_of(op)}"],
            "use the variable's own methods, or an optimizer that does; or a strategy "
            "that leaves this variable whole.",
        )
    )


def _untied(
    ops: Sequence[tf.Operation],
    kept: Set[tf.Operation],
    initializers: Set[tf.Operation],
) -> list[tf.Operation]:
    """Returns a replica's ops without ties; rows are gathered of parts."""
    ties = [op for op in ops if is_tie(op) and op not in initializers]
    if not ties:
        return list(ops)
    joins: dict[tf.Operation, None] = {}
    added: dict[tf.Operation, list[tf.Operation]] = {}
    for tie in ties:
        value = tie.inputs[0]
        if _has(tie, STAND_IN, STAND_IN):
            value = _nothing(value.dtype, tie.device)
            added[tie] = [value.op.inputs[0].op, value.op]
            _spell_zeros(tie.outputs[0], added)
        elif value.op.type == "ConcatV2":
            joins[value.op] = None
        _tf.replace(tie.outputs[0], value)
        _tf.move_control_outputs(tie, value.op)
    gone = set(ties)
    for join in joins:
        _turn_gathers(join, kept, added, gone)
    _tf.abandon(list(gone))
    made: list[tf.Operation] = []
    for op in ops:
        made += added.get(op, [])
        if op not in gone:
            made.append(op)
    return made


def _spell_zeros(
    stand_in: tf.Tensor, added: dict[tf.Operation, list[tf.Operation]]
) -> None:
    """Says which zeros a gradient begins with that loops return for a stand-in.

    Args:
        stand_in: Is about to become one number.
        added: Is told what comes in the place of an op.
    """
    for loop in stand_in.consumers():
        if loop.type not in _LOOPS:
            continue
        for index, tensor in enumerate(loop.inputs):
            if tensor is not stand_in:
                continue
            for op in loop.outputs[index].consumers():
                if op.type == "ZerosLike":
                    added[op] = _zeros_for(op, stand_in.shape)


def _zeros_for(op: tf.Operation, shape: tf.TensorShape) -> list[tf.Operation]:
    """Replaces zeros that are like something; returns the new ops."""
    start = _tf.operation_count(op.graph)
    with tf.control_dependencies(None), tf.device(None), tf.device(op.device):
        zeros = tf.zeros(shape, op.outputs[0].dtype)
    _tf.replace(op.outputs[0], zeros)
    return list(op.graph.get_operations()[start:])


@dataclasses.dataclass(frozen=True)
class _Gather:
    """A gather of rows of what was joined.

    Attributes:
        op: The gather.
        casts: What is between, from the join on.
    """

    op: tf.Operation
    casts: tuple[tf.Operation, ...]


def _turn_gathers(
    join: tf.Operation,
    kept: Set[tf.Operation],
    added: dict[tf.Operation, list[tf.Operation]],
    gone: set[tf.Operation],
) -> None:
    """Lets parts be gathered from in place of what was joined of them.

    Args:
        join: Concatenates the parts.
        kept: Ops whose results leave the step.
        added: Is told what comes in the place of an op.
        gone: Is told which ops do nothing any more.
    """
    uses = _uses(join, kept, ())
    found = [_read_of(tensor) for tensor in list(join.inputs)[:-1]]
    reads = [read for read in found if read is not None]
    if uses is None or len(reads) < len(found):
        return
    for use in uses:
        if use.op not in added:
            added[use.op] = _gather_of_parts(join, reads, use)
            gone.add(use.op)
    between = _between(join)
    gone |= {join, *between}
    nothing = _nothing(reads[0].dtype, join.device)
    for tensor in list(join.inputs)[:-1]:
        if tensor.op.type == "Identity" and len(tensor.consumers()) == 1:
            gone.add(tensor.op)
    for op in [join, *(t.op for t in list(join.inputs)[:-1])]:
        for index, tensor in enumerate(list(op.inputs)):
            # An op cannot be without inputs, and what is read for nobody is read.
            if op in gone and tensor.op.type == "ReadVariableOp":
                _tf.set_input(op, index, nothing)


def _nothing(dtype: tf.DType, device: str) -> tf.Tensor:
    """Returns a number that may take the place of a tensor of any shape."""
    with tf.control_dependencies(None), tf.device(None), tf.device(device):
        return tf.raw_ops.PlaceholderWithDefault(
            input=tf.constant(0, dtype), shape=tf.TensorShape(None)
        )


def _uses(
    op: tf.Operation, kept: Set[tf.Operation], casts: tuple[tf.Operation, ...]
) -> list[_Gather] | None:
    """Returns the gathers of rows of an op's result; None if anything else uses it."""
    if op in kept or _tf.control_outputs(op):
        return None
    found: list[_Gather] = []
    for consumer in op.outputs[0].consumers():
        if is_tie(consumer):  # which gave way
            continue
        if consumer.type in _TRANSPARENT:
            more = _uses(consumer, kept, (*casts, consumer))
            if more is None:
                return None
            found += more
        elif (
            consumer.type == "GatherV2"
            and consumer.inputs[0].op is op
            and rows.gathers_rows(consumer)
        ):
            found.append(_Gather(consumer, casts))
        else:
            return None
    return found


def _between(op: tf.Operation) -> list[tf.Operation]:
    """Returns the ops that hand on an op's result, to any depth."""
    found = []
    for consumer in op.outputs[0].consumers():
        if consumer.type in _TRANSPARENT:
            found += [consumer, *_between(consumer)]
    return found


def _read_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns what was read of a part, if nothing but identities is behind it."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor if tensor.op.type == "ReadVariableOp" else None


def _gather_of_parts(
    join: tf.Operation, reads: Sequence[tf.Tensor], use: _Gather
) -> list[tf.Operation]:
    """Gathers rows of each part, and joins them; returns the new ops."""
    old, indices = use.op.outputs[0], use.op.inputs[1]
    axis = int(tf.get_static_value(join.inputs[len(reads)]))
    graph = join.graph
    start = _tf.operation_count(graph)

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
        value = rows.gathered(
            [reader(read) for read in reads],
            indices,
            axis,
            [shapes.defined(read)[axis] for read in reads],
        )
        for cast in use.casts:
            value = tf.cast(value, cast.outputs[0].dtype)
        value = tf.identity(value)
    value.set_shape(old.shape)
    _tf.replace(old, value)
    _tf.move_control_outputs(use.op, value.op)
    return list(graph.get_operations()[start:])
