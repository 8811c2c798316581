# SPDX-License-Identifier: Apache-2.0
"""Orders reads of variables before a step's updates, on all replicas.

In a plain tf.Graph nothing orders a read and an update that do not depend on each
other: the runtime decides. On one device the read nearly always comes first, having
nothing to wait for. That must hold on many, too, where one replica's update may be
another's as well. Reads that the program makes wait for an update stay behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.autodist import flows, slots, uses
from replicator.autodist.program import Program
from replicator.autodist.stamping import Places
from replicator.graph.ir.kinds import resource_inputs
from replicator.graph.order import effects

_UPDATES = re.compile(
    rf"Assign(Add|Sub)VariableOp|{slots.UPDATES.pattern}|ResourceScatter\w+"
)


def read_first(program: Program, places: Sequence[Places]) -> None:
    """Makes updates wait for the reads of the variables they update.

    Args:
        program: The single-device graph.
        places: The copies of its ops on each replica; an op that one replica runs for
            all has the same copy on each.
    """
    reads = _first_reads(program)
    for op in program.copied:
        if not updates(program, op):
            continue
        before: list[tf.Operation] = []
        for _, tensor in resource_inputs(op):
            variable = program.variable_behind(tensor)
            if variable is not None:
                before += reads.get(variable.op.name, [])
        copies = [replica_places[op] for replica_places in places]
        if all(copy is copies[0] for copy in copies):
            _tf.add_control_inputs(
                copies[0],
                [replica_places[b] for replica_places in places for b in before],
            )
        else:
            for copy, replica_places in zip(copies, places, strict=True):
                _tf.add_control_inputs(copy, [replica_places[b] for b in before])


def _first_reads(program: Program) -> dict[str, list[tf.Operation]]:
    """Returns the reads of each variable, by its name, that wait for no update."""
    reads: dict[str, list[tf.Operation]] = {}
    for op in program.copied:
        if op.type not in uses.READS or op.control_inputs:
            continue
        before = flows.upstream(list(op.inputs[1:]), lambda one: False)
        variable = program.variable_behind(op.inputs[0])
        waits = any(one.control_inputs or updates(program, one) for one in before)
        if variable is None or waits:
            continue
        reads.setdefault(variable.op.name, []).append(op)
    return reads


def keep_owners_writes(
    program: Program,
    places: Sequence[Places],
    owner_of: Callable[[tf.Variable], int | None],
) -> None:
    """Makes the owner's write of an owned variable that of all replicas.

    Args:
        program: The single-device graph.
        places: The copies of its ops on each replica.
        owner_of: Returns the place of the replica that owns a variable, or None.
    """
    reads = _first_reads(program)
    for op in program.copied:
        for tensor in [t for k, t in resource_inputs(op) if effects.writes(op, k)]:
            variable = program.variable_behind(tensor)
            owner = None if variable is None else owner_of(variable)
            if owner is None:
                continue
            owners_write = places[owner][op]
            if not slots.UPDATES.fullmatch(op.type) and updates(program, op):
                # An optimizer waits for the gradients of all replicas anyway.
                before = reads.get(variable.op.name, [])
                _tf.add_control_inputs(
                    owners_write, [others[b] for others in places for b in before]
                )
            for replica_places in places:
                if replica_places[op] is not owners_write:
                    _tf.move_control_outputs(replica_places[op], owners_write)
                    replica_places[op] = owners_write


def updates(program: Program, op: tf.Operation) -> bool:
    """Whether an op writes a value that depends on the variable's previous one."""
    return bool(_UPDATES.fullmatch(op.type)) or _changes(program, op)


def _changes(program: Program, op: tf.Operation) -> bool:
    """Whether an op assigns a value computed from the variable's own.

    Ops that initialize or restore a variable cannot wait for reads of it.
    """
    if op.type != "AssignVariableOp":
        return False
    variable = program.variable_behind(op.inputs[0])
    if variable is None or op is variable.initializer:
        return False
    return any(
        program.variable_behind(source.inputs[0]) is variable
        for source in flows.upstream([op.inputs[1]], lambda one: False)
        if source.type == "ReadVariableOp"
    )
