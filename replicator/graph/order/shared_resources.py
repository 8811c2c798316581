# SPDX-License-Identifier: Apache-2.0
"""Makes replicas use a shared iterator or table in the same order in every run.

Effects are in program order within a replica only (ordering.py), and most resources
belong to one replica. Objects from outside step_fn, a tf.data iterator or a hash table,
are shared by all replicas: without an order, chance would decide which replica comes
first, and so which of them gets which element.

The order is one in which the ops can run: each after all that it waits for,
communication included; among the ops that could come next, the first replica's comes
first. So no edge that is added here can close a cycle. Ops that may wait until another
replica has done something (queues, Python functions) are left unordered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.graph.ir import walk
from replicator.graph.ir.kinds import resource_inputs
from replicator.graph.order import effects

_READERS = re.compile(r"LookupTable(Find|Size|Export)(V2)?")
_WRITERS = re.compile(
    r"IteratorGetNext(Sync|AsOptional)?|LookupTable(Insert|Import|Remove)(V2)?"
)


def order(
    replicas: Sequence[Sequence[tf.Operation]],
    initializers: Set[tf.Operation],
) -> None:
    """Orders the replicas' uses of the resources that they share.

    Args:
        replicas: `replicas[r]` are the ops of replica r that touch resources, in build
            order, with merged ops in the places of those that they replace.
        initializers: Ops that initialize variables, which are not part of the step.
    """
    shared = _shared(replicas, initializers)
    if not shared:
        return
    users = [op for ops in replicas for op in ops if op in shared]
    writers: dict[int, tf.Operation] = {}
    readers: dict[int, list[tf.Operation]] = {}
    for op in walk.in_order(reversed(users)):
        for key, writes in shared.get(op, {}).items():
            predecessors = readers.pop(key, []) if writes else []
            if key in writers:
                predecessors.append(writers[key])
            tf_ops.add_control_inputs(op, [p for p in predecessors if p is not op])
            if writes:
                writers[key] = op
            else:
                readers.setdefault(key, []).append(op)


def _shared(
    replicas: Sequence[Sequence[tf.Operation]], initializers: Set[tf.Operation]
) -> dict[tf.Operation, dict[int, bool]]:
    """Finds the resources that several replicas use and one of them changes.

    Returns:
        For each op the ids of such resources, and whether it changes them.
    """
    several = _used_by_several(replicas)
    uses_by_op: dict[tf.Operation, dict[int, bool]] = {}
    for op in (op for ops in replicas for op in ops) if several else ():
        for index, tensor in resource_inputs(op):
            if id(tensor) not in several or op in initializers:
                continue
            for type_ in effects.uses(op, index):
                writes = bool(_WRITERS.fullmatch(type_))
                if writes or _READERS.fullmatch(type_):
                    uses = uses_by_op.setdefault(op, {})
                    uses[id(tensor)] = uses.get(id(tensor), False) or writes
    changed = {
        key for uses in uses_by_op.values() for key, writes in uses.items() if writes
    }
    return {
        op: shared_uses
        for op, uses in uses_by_op.items()
        if (
            shared_uses := {
                key: writes for key, writes in uses.items() if key in changed
            }
        )
    }


def _used_by_several(replicas: Sequence[Sequence[tf.Operation]]) -> set[int]:
    """Returns the ids of the resources that more than one replica uses."""
    users: dict[int, set[int]] = {}
    for r, ops in enumerate(replicas):
        for op in ops:
            for _, tensor in resource_inputs(op):
                users.setdefault(id(tensor), set()).add(r)
    return {resource for resource, replica_ids in users.items() if len(replica_ids) > 1}
