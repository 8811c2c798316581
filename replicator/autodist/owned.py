# SPDX-License-Identifier: Apache-2.0
"""Ops of which only the owner of a variable has a copy, and that is everyone's.

What initializes a variable that one replica owns, what updates it from what is the same
on all replicas, and what nobody uses: a copy of these with each replica would be one
that never runs, in a graph of which TensorFlow looks at each op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import marked, slots
from replicator.autodist.program import Program
from replicator.autodist.stamping import Places
from replicator.autodist.variables import Variables
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import kind_of, resource_inputs

_ASKS = ("ReadVariableOp", "VarIsInitializedOp")


def find(program: Program, variables: Variables) -> dict[tf.Operation, int]:
    """Returns the ops of which one copy is enough, with the place of its replica.

    Args:
        program: The single-device graph.
        variables: What its variables are on all replicas.
    """
    flow = switching.Flow(program.graph.get_operations()[: program.count])
    differing = program.differing() | _unproven(program)
    found: dict[tf.Operation, int] = {}
    for op in program.copied:
        owner = _owner(op, program, variables)
        if owner is None or op in flow or op.control_inputs:
            continue
        if op.type in _ASKS:
            alone = not _is_used(op)
        elif op.type == "AssignVariableOp":
            alone = op is program.variable_behind(op.inputs[0]).initializer
        else:
            alone = bool(slots.UPDATES.fullmatch(op.type)) and op not in differing
        if alone:
            found[op] = owner
    return found


def share(found: Mapping[tf.Operation, int], places: Sequence[Places]) -> None:
    """Lets one copy of an op be that of all replicas.

    Args:
        found: The ops, with the places of those replicas that have a copy.
        places: What ops are on each replica.
    """
    before: dict[tuple[tf.Operation, int], list[tf.Operation]] = {}
    for op, n in found.items():
        copy = places[n][op]
        waiting = [one for one in _tf.control_outputs(op) if one not in found]
        for r, own in enumerate(places):
            own[op] = copy
            for one in waiting if r != n else ():
                before.setdefault((one, r), []).append(copy)
    for (one, r), copies in before.items():
        if one in places[r]:
            _tf.add_control_inputs(places[r][one], copies)


def _owner(op: tf.Operation, program: Program, variables: Variables) -> int | None:
    """Returns the place of the replica that owns all variables that an op is given."""
    owners = set()
    for _, tensor in resource_inputs(op):
        variable: Any = program.variable_behind(tensor)
        if variable is None or variables.behind(program, tensor).placement.has_copies:
            return None
        owners.add(variables.owner_of(variable))
    return owners.pop() if len(owners) == 1 else None


def _is_used(op: tf.Operation) -> bool:
    return bool(op.outputs[0].consumers() or _tf.control_outputs(op))


def _unproven(program: Program) -> set[tf.Operation]:
    """Returns the ops that depend on more than variables, constants and gradients.

    Of what has a state of its own, only a comparison of all copies tells whether it is
    the same on all replicas. The gradients of all replicas add up to what is.
    """
    stack = [
        op
        for op in program.copied
        if kind_of(op).stateful and op.outputs and op.type not in _ASKS
    ]
    found = set(stack)
    while stack:
        for tensor in stack.pop().outputs:
            for op in tensor.consumers():
                if op not in found and marked.text(op, marked.GRADIENT) is None:
                    found.add(op)
                    stack.append(op)
    return found
