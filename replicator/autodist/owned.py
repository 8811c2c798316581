# SPDX-License-Identifier: Apache-2.0
"""Finds ops that only the owner of a variable needs a copy of.

These initialize a variable that one replica owns, update it from values equal on all
replicas, or are unused. Other replicas' copies would never run, yet TensorFlow has to
process every op of the graph.
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
    """Returns the ops that need a single copy, with the place of its replica.

    Args:
        program: The single-device graph.
        variables: Its variables on all replicas.
    """
    flow = switching.Flow(program.graph.get_operations()[: program.count])
    differing = program.differing() | _unproven(program)
    owners: dict[tf.Operation, int] = {}
    for op in program.copied:
        owner = _owner(op, program, variables)
        if owner is None or op in flow or op.control_inputs:
            continue
        if op.type in _ASKS:
            is_single = not _is_used(op)
        elif op.type == "AssignVariableOp":
            is_single = op is program.variable_behind(op.inputs[0]).initializer
        else:
            is_single = bool(slots.UPDATES.fullmatch(op.type)) and op not in differing
        if is_single:
            owners[op] = owner
    return owners


def share(found: Mapping[tf.Operation, int], places: Sequence[Places]) -> None:
    """Makes the single copy of an op that of all replicas.

    Args:
        found: The ops, with the places of the replicas that have the copy.
        places: The copies of ops on each replica.
    """
    before: dict[tuple[tf.Operation, int], list[tf.Operation]] = {}
    for op, n in found.items():
        copy = places[n][op]
        waiting = [waiter for waiter in _tf.control_outputs(op) if waiter not in found]
        for r, replica_places in enumerate(places):
            replica_places[op] = copy
            for waiter in waiting if r != n else ():
                before.setdefault((waiter, r), []).append(copy)
    for (waiter, r), copies in before.items():
        if waiter in places[r]:
            _tf.add_control_inputs(places[r][waiter], copies)


def _owner(op: tf.Operation, program: Program, variables: Variables) -> int | None:
    """Returns the place of the replica that owns all variables an op uses, or None."""
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

    Whether results of stateful ops are the same on all replicas only shows in a
    comparison of all copies. Gradients are the same, being summed over all replicas.
    """
    stack = [
        op
        for op in program.copied
        if kind_of(op).stateful and op.outputs and op.type not in _ASKS
    ]
    unproven = set(stack)
    while stack:
        for tensor in stack.pop().outputs:
            for op in tensor.consumers():
                if op not in unproven and marked.text(op, marked.GRADIENT) is None:
                    unproven.add(op)
                    stack.append(op)
    return unproven
