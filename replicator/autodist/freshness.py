# SPDX-License-Identifier: Apache-2.0
"""Variables are read before a step updates them, on all replicas.

In a plain tf.Graph nothing orders a read and an update that do not depend on one
another: which comes first is up to the runtime. On one device that is nearly always the
read, which has nothing to wait for; it is to be so on many, where the update of one
replica may be another's, too. What a program makes wait for an update stays behind it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.autodist import flows, slots
from replicator.autodist.program import Program
from replicator.autodist.stamping import Places
from replicator.graph.ir.kinds import resource_inputs
from replicator.graph.order import effects

_UPDATES = re.compile(
    rf"Assign(Add|Sub)VariableOp|{slots.UPDATES.pattern}|ResourceScatter\w+"
)


def read_first(program: Program, places: Sequence[Places]) -> None:
    """Lets updates wait for the reads of what they update.

    Args:
        program: The single-device graph.
        places: What its ops are on each replica; of what one replica does for all, the
            same op on each.
    """
    reads: dict[str, list[tf.Operation]] = {}
    for op in program.copied:
        if op.type == "ReadVariableOp" and not op.control_inputs:
            variable = program.variable_behind(op.inputs[0])
            if variable is not None:
                reads.setdefault(variable.op.name, []).append(op)
    for op in program.copied:
        if not updates(program, op):
            continue
        before: list[tf.Operation] = []
        for _, tensor in resource_inputs(op):
            variable = program.variable_behind(tensor)
            if variable is not None:
                before += reads.get(variable.op.name, [])
        done = [own[op] for own in places]
        if all(one is done[0] for one in done):
            _tf.add_control_inputs(done[0], [own[b] for own in places for b in before])
        else:
            for one, own in zip(done, places, strict=True):
                _tf.add_control_inputs(one, [own[b] for b in before])


def keep_owners_writes(
    program: Program,
    places: Sequence[Places],
    owner_of: Callable[[tf.Variable], int | None],
) -> None:
    """Lets one write of a variable that one replica owns be that of all.

    Args:
        program: The single-device graph.
        places: What its ops are on each replica.
        owner_of: Returns the place of the replica that owns a variable, or None.
    """
    for op in program.copied:
        for tensor in [t for k, t in resource_inputs(op) if effects.writes(op, k)]:
            variable = program.variable_behind(tensor)
            owner = None if variable is None else owner_of(variable)
            if owner is None:
                continue
            keep = places[owner][op]
            for own in places:
                if own[op] is not keep:
                    _tf.move_control_outputs(own[op], keep)
                    own[op] = keep


def updates(program: Program, op: tf.Operation) -> bool:
    """Whether an op writes what depends on the value that was there before."""
    return bool(_UPDATES.fullmatch(op.type)) or _changes(program, op)


def _changes(program: Program, op: tf.Operation) -> bool:
    """Whether an op assigns what follows from the variable's own value.

    What initializes or restores a variable cannot wait for it to be read.
    """
    if op.type != "AssignVariableOp":
        return False
    variable = program.variable_behind(op.inputs[0])
    if variable is None or op is variable.initializer:
        return False
    return any(
        program.variable_behind(one.inputs[0]) is variable
        for one in flows.upstream([op.inputs[1]], lambda one: False)
        if one.type == "ReadVariableOp"
    )
