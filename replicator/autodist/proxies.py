# SPDX-License-Identifier: Apache-2.0
"""Keeps replicas' local copies of owned variables up to date.

Each replica reads its own copy. Every write of the variable is followed by a refresh of
all copies, and ops that waited for the write wait for the refresh.

Source: AutoDist's local_proxy_variable (Zhang et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import freshness, uses
from replicator.autodist.program import Program
from replicator.autodist.stamping import Places
from replicator.graph.ir.kinds import kind_of, resource_inputs
from replicator.graph.order import effects


def can_follow(program: Program, name: str) -> bool:
    """Whether a variable can have local copies: control flow does not use it."""
    handle = program.variables[name].op.outputs[0]
    users = list(handle.consumers())
    for op in handle.consumers():
        if op.type == "Identity":
            users += op.outputs[0].consumers()
    return not any(kind_of(op).calls or op.type in ("Switch", "Enter") for op in users)


def keep_up(
    program: Program,
    places: Sequence[Places],
    variables: Mapping[str, Any],
    devices: Sequence[str],
) -> None:
    """Makes each replica read its copies, and refreshes them after writes.

    Args:
        program: The graph that is copied for each replica.
        places: The copies of its ops on each replica.
        variables: ReplicatedVariables, by name.
        devices: The device of each replica.
    """
    reads: dict[str, list[tf.Operation]] = {}
    writes: list[tuple[tf.Operation, Any]] = []
    for op in program.copied:
        for k, tensor in resource_inputs(op):
            original = program.variable_behind(tensor)
            variable = None if original is None else variables[original.op.name]
            if variable is None or not variable.placement.has_copies:
                continue
            if op.type in uses.READS:
                for replica_places, copy in zip(
                    places, variable.components, strict=False
                ):
                    _tf.set_input(replica_places[op], k, copy.handle)
                if not op.control_inputs and op.type == "ReadVariableOp":
                    reads.setdefault(original.op.name, []).append(op)
            elif effects.writes(op, k):
                writes.append((op, original))
    for op, original in writes:
        name = original.op.name
        before = reads.get(name, []) if freshness.updates(program, op) else []
        refresh = _refresh(places[0][op], variables[name], before, places, devices)
        for replica_places in places:
            replica_places[op] = refresh


def _refresh(
    write: tf.Operation,
    variable: Any,
    reads: Sequence[tf.Operation],
    places: Sequence[Places],
    devices: Sequence[str],
) -> tf.Operation:
    """Updates all copies after a write; returns the op that ends this."""
    first = variable.storage.first
    with tf.name_scope("AutoDist/proxies"):
        end: tf.Operation = tf.no_op()
        _tf.move_control_outputs(write, end)
        with tf.control_dependencies([write]), tf.device(first.device):
            value = tf.raw_ops.ReadVariableOp(
                resource=first.handle, dtype=variable.dtype
            )
        assigned = [write]
        pairs = zip(places, variable.components, devices, strict=False)
        for replica_places, component, device in pairs:
            if component is first:
                continue
            with tf.device(device):
                copy = tf.identity(value)
                tf.raw_ops.AssignVariableOp(resource=component.handle, value=copy)
            (assign,) = copy.consumers()
            _tf.add_control_inputs(assign, [replica_places[op] for op in reads])
            assigned.append(assign)
        _tf.add_control_inputs(end, assigned)
    return end
