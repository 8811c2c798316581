# SPDX-License-Identifier: Apache-2.0
"""Copies that replicas have of a variable which one device has for all.

What a replica reads, it reads from its own copy. Whatever writes the variable is
followed by what gives all copies the new value, and what waited for the one waits for
the other.

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
    """Whether copies of a variable can be kept up: no control flow is given it."""
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
    """Has each replica read its copies, and writes be followed by their refresh.

    Args:
        program: What is copied for each replica.
        places: What its ops are on each.
        variables: ReplicatedVariables, by their names.
        devices: Of the replicas.
    """
    reads: dict[str, list[tf.Operation]] = {}
    writes: list[tuple[tf.Operation, Any]] = []
    for op in program.copied:
        for k, tensor in resource_inputs(op):
            original = program.variable_behind(tensor)
            made = None if original is None else variables[original.op.name]
            if made is None or not made.placement.has_copies:
                continue
            if op.type in uses.READS:
                for own, copy in zip(places, made.components, strict=False):
                    _tf.set_input(own[op], k, copy.handle)
                if not op.control_inputs and op.type == "ReadVariableOp":
                    reads.setdefault(original.op.name, []).append(op)
            elif effects.writes(op, k):
                writes.append((op, original))
    for op, original in writes:
        name = original.op.name
        before = reads.get(name, []) if freshness.updates(program, op) else []
        done = _refresh(places[0][op], variables[name], before, places, devices)
        for own in places:
            own[op] = done


def _refresh(
    write: tf.Operation,
    variable: Any,
    reads: Sequence[tf.Operation],
    places: Sequence[Places],
    devices: Sequence[str],
) -> tf.Operation:
    """Adds what gives all copies the value that was written; returns what ends it."""
    first = variable.storage.first
    with tf.name_scope("AutoDist/proxies"):
        done: tf.Operation = tf.no_op()
        _tf.move_control_outputs(write, done)
        with tf.control_dependencies([write]), tf.device(first.device):
            value = tf.raw_ops.ReadVariableOp(
                resource=first.handle, dtype=variable.dtype
            )
        assigned = [write]
        pairs = zip(places, variable.components, devices, strict=False)
        for own, component, device in pairs:
            if component is first:
                continue
            with tf.device(device):
                copy = tf.identity(value)
                tf.raw_ops.AssignVariableOp(resource=component.handle, value=copy)
            (assign,) = copy.consumers()
            _tf.add_control_inputs(assign, [own[op] for op in reads])
            assigned.append(assign)
        _tf.add_control_inputs(done, assigned)
    return done
