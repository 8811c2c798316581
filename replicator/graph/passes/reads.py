# SPDX-License-Identifier: Apache-2.0
"""Reads each variable once between two writes, and not at all after an assignment.

Optimizers and layers read the same variable again and again (Keras reads the learning
rate once per variable that it updates), and the runtime does not merge reads. In steps
of many small ops, reads are a substantial part of all ops. Runs after everything is
built and before effects are ordered; reads without consumers are left out.

If only some rows of a variable are used, as with an embedding, only these are read. So
that rows can be updated in place, TensorFlow copies the whole variable at each whole
read, and Keras layers read it whole.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set
from typing import Any

import tensorflow as tf

from replicator._tf import choice, effects
from replicator._tf import ops as tf_ops
from replicator.graph.ir.kinds import resource_inputs, touched
from replicator.graph.order.effects import may_write
from replicator.graph.passes.rows import gathers_rows


class Recent:
    """The values of variables, as far as known while a replica is built.

    `join_reads` merges repeated reads later. Where an optimizer updates hundreds of
    variables, not creating them at all saves a twentieth of the time of a build.
    """

    def __init__(self) -> None:
        # By the id of a handle: the handle, the place, the value, the op that read or
        # assigned it, and how many ops used the handle by then.
        self._known: dict[int, tuple[Any, Any, tf.Tensor, tf.Operation, int]] = {}

    def value(self, handle: Any) -> tf.Tensor | None:
        """Returns what a read would return, if no op has used the handle since.

        Args:
            handle: The handle of a variable.

        Returns:
            The value; None if it is unknown, a tape may record the read, or it would
            wait for something.
        """
        entry = self._known.get(id(handle))
        if entry is None:
            return None
        _, place, value, op, users = entry
        if place != choice.place_of_reads() or _users(op) != users:
            return None
        return value

    def enter(self, handle: Any, op: tf.Operation, shape: tf.TensorShape) -> None:
        """Records an op that reads or assigns a variable; any other is ignored.

        Args:
            handle: The handle of the variable.
            op: An op that was just created.
            shape: The variable's shape; that of an assigned value may be more specific,
                or less.
        """
        place = choice.place_of_reads()
        if place is None or op.graph is not place[0]:
            return
        if op.type == "ReadVariableOp":
            value = op.outputs[0]
        elif op.type == "AssignVariableOp":
            value = op.inputs[1]
        else:
            return
        if repr(value.shape) != repr(shape):  # as text, unknown sizes are equal
            return
        self._known[id(handle)] = handle, place, value, op, _users(op)


def _users(op: tf.Operation) -> int:
    """Returns how many ops of its graph use the variable that an op uses."""
    return _uses(op.inputs[0])


def _uses(resource: tf.Tensor) -> int:
    """Returns how many ops use a resource, by itself or through identities of it."""
    consumers = resource.consumers()
    identities = [op for op in consumers if op.type == "Identity"]
    return len(consumers) + sum(_uses(op.outputs[0]) for op in identities)


def join_reads(
    replicas: Sequence[Sequence[tf.Operation]],
    initializers: Set[tf.Operation],
) -> int:
    """Points the consumers of repeated reads at the first one, or the assigned value.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph, in build order.
        initializers: Ops among them that initialize variables; what they read and
            assign is not part of the step.

    Returns:
        The number of reads that have lost their consumers.
    """
    joined = 0
    for ops in replicas:
        values: dict[int, tf.Tensor] = {}  # by the id of the resource
        for op in ops:
            if op in initializers:
                continue
            if op.type != "ReadVariableOp":
                for _, tensor in resource_inputs(op):
                    if not effects.only_reads(op):
                        values.pop(id(tensor), None)
                if op.type == "AssignVariableOp":
                    resource, value = op.inputs
                    values[id(resource)] = value
            elif not op.control_inputs:
                value_now = values.setdefault(id(op.inputs[0]), op.outputs[0])
                if value_now is not op.outputs[0]:
                    tf_ops.replace(op.outputs[0], value_now)
                    joined += 1
    return joined


def share_reads(
    replicas: Sequence[Sequence[tf.Operation]],
    initializers: Set[tf.Operation],
    shared: Set[int],
) -> int:
    """Lets all replicas use one read of a variable that they share.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph, in build order,
            with the same writes at the same places on all.
        initializers: Ops among them that initialize variables.
        shared: The ids of the handles through which all replicas use the variables.

    Returns:
        The number of reads that have lost their consumers.
    """
    joined = 0
    # By the id of a handle and the number of writes so far.
    values: dict[tuple[int, int], tf.Tensor] = {}
    for ops in replicas if shared else ():
        writes = dict.fromkeys(shared, 0)
        for op in ops:
            for _, tensor in resource_inputs(op):
                if id(tensor) not in writes or op in initializers:
                    continue
                if may_write(op):
                    # Functions that only read may be called by some replicas only.
                    writes[id(tensor)] += id(tensor) in touched(op)[1]
                elif op.type == "ReadVariableOp" and not op.control_inputs:
                    place = (id(tensor), writes[id(tensor)])
                    shared_value = values.setdefault(place, op.outputs[0])
                    if shared_value is not op.outputs[0]:
                        tf_ops.replace(op.outputs[0], shared_value)
                        joined += 1
    return joined


def share_joins(
    replicas: Sequence[Sequence[tf.Operation]],
    near: Sequence[Sequence[int]],
    initializers: Set[tf.Operation],
) -> int:
    """Lets replicas that share memory use one join of the same reads.

    Each replica joins the parts of a partitioned variable that it reads. Once their
    reads are shared, replicas whose devices share memory join the same values: one of
    them does so, and the others use its result, which is not copied. So a partitioned
    variable is copied once per step, however many replicas there are.

    Args:
        replicas: `replicas[n]` are the ops of a replica's sub-graph, in build order.
        near: The positions of replicas that share memory, in groups.
        initializers: Ops that initialize variables, which are not part of the step.

    Returns:
        The number of joins that have lost their consumers.
    """
    joined = 0
    for group in near:
        values: dict[Hashable, tf.Tensor] = {}
        for op in (op for n in group for op in replicas[n]):
            if op.type != "ConcatV2" or op in initializers:
                continue
            key = _join_key(op)
            if key is None:
                continue
            shared_value = values.setdefault(key, op.outputs[0])
            if shared_value is not op.outputs[0]:
                tf_ops.replace(op.outputs[0], shared_value)
                joined += 1
    return joined


def _join_key(op: tf.Operation) -> Hashable | None:
    """Returns a key of the values that an op joins; None if any is not just read.

    Also None if it waits for other ops. The axis is checked, too: TensorFlow adds no
    control input to an op whose input has it already.
    """
    *tensors, axis = op.inputs
    reads = [_read_of(tensor) for tensor in tensors]
    along = tf.get_static_value(axis)
    if along is None or None in reads or op.control_inputs or axis.op.control_inputs:
        return None
    return tuple(reads), int(along)


def _read_of(tensor: tf.Tensor) -> int | None:
    """Returns the id of the value of a read that a tensor passes on, or None."""
    while tensor.op.type == "Identity" and not tensor.op.control_inputs:
        tensor = tensor.op.inputs[0]
    return id(tensor) if tensor.op.type == "ReadVariableOp" else None


def read_rows(
    replicas: Sequence[Sequence[tf.Operation]],
    initializers: Set[tf.Operation],
) -> list[list[tf.Operation]]:
    """Reads only rows of a variable where a step reads all of it to gather rows.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph, in build order.
        initializers: Ops among them that initialize variables.

    Returns:
        The ops of each replica, with each read of rows after the gather it replaces.
    """
    return [_read_rows(ops, initializers) for ops in replicas]


def _read_rows(
    ops: Sequence[tf.Operation], initializers: Set[tf.Operation]
) -> list[tf.Operation]:
    if not any(op.type == "GatherV2" for op in ops):
        return list(ops)
    current: dict[int, set[tf.Operation]] = {}  # reads since the last write
    gathers: dict[tf.Operation, tf.Operation] = {}  # the read that each gather uses
    for op in ops:
        if op in initializers:
            continue
        if op.type == "ReadVariableOp":
            if not op.control_inputs:
                current.setdefault(id(op.inputs[0]), set()).add(op)
        elif op.type == "GatherV2":
            read = op.inputs[0].op
            # After a later write, it would read the new value.
            if (
                read.type == "ReadVariableOp"
                and op.outputs[0].dtype.is_floating  # all devices can read rows of it
                and gathers_rows(op)
            ):
                if read in current.get(id(read.inputs[0]), ()):
                    gathers[op] = read
        elif not effects.only_reads(op):
            for _, tensor in resource_inputs(op):
                current.pop(id(tensor), None)
    partial = {
        read
        for read in gathers.values()
        if all(consumer in gathers for consumer in read.outputs[0].consumers())
        and not tf_ops.control_outputs(read)
    }
    if not partial:
        return list(ops)
    if next(iter(partial)).graph.building_function:
        tf_ops.abandon(list(partial))
    new_ops = []
    for op in ops:
        if op not in partial:
            new_ops.append(op)
        if op in gathers and gathers[op] in partial:
            new_ops.append(_rows_of(gathers[op], op))
    return new_ops


def _rows_of(read: tf.Operation, gather: tf.Operation) -> tf.Operation:
    """Replaces a gather from a read by one from the variable; returns the new op."""
    old = gather.outputs[0]
    with tf.control_dependencies(None), tf.device(None), tf.device(read.device):
        rows = tf.raw_ops.ResourceGather(
            resource=read.inputs[0], indices=gather.inputs[1], dtype=old.dtype
        )
    rows.set_shape(old.shape)
    # TensorFlow adds no control input to an op whose input has it already: the axis.
    axis = gather.inputs[2].op
    tf_ops.add_control_inputs(rows.op, [*gather.control_inputs, *axis.control_inputs])
    tf_ops.replace(old, rows)
    tf_ops.move_control_outputs(gather, rows.op)
    return rows.op


def leave_out_unused(
    replicas: Sequence[Sequence[tf.Operation]],
    initializers: Set[tf.Operation],
) -> list[list[tf.Operation]]:
    """Leaves out reads whose values nothing uses, and no collection has.

    Writes of the variable would wait for them, and so make them run.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph, in build order.
        initializers: Ops among them that initialize variables.

    Returns:
        The other ops of each replica.
    """
    graph = tf.compat.v1.get_default_graph()
    items = [graph.get_collection_ref(k) for k in graph.get_all_collection_keys()]
    collected = set(map(id, tf.nest.flatten(items, expand_composites=True)))
    unused = {
        op
        for ops in replicas
        for op in ops
        if op.type == "ReadVariableOp"
        and id(op.outputs[0]) not in collected
        and not op.outputs[0].consumers()
        and not tf_ops.control_outputs(op)
        and op not in initializers
    }
    if graph.building_function:
        tf_ops.abandon(list(unused))
    return [[op for op in ops if op not in unused] for ops in replicas]
