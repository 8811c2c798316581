# SPDX-License-Identifier: Apache-2.0
"""What one replica does for all of them, however many there are.

Of a variable that has an owner, the owner's write is kept (owners.py), and with it what
computes only that: the optimizer's work. All other replicas leave it out. What no
single replica computes, as communication, all of them need.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir.kinds import has_effect, touched

REPLICA = re.compile(r"(?:^|/)replica_(\d+)/")  # in the name of an op of a replica's


def names(
    ops: Sequence[tf.Operation],
    leaves: Iterable[Any],
    variables: Collection[Any],
    graph: Any,
) -> set[str]:
    """Returns the names of the ops that run once, for all replicas.

    Args:
        ops: Those of a step that is built.
        leaves: What it returns.
        variables: The ReplicatedVariables that it uses.
        graph: Where it is built.
    """
    owned = {
        id(graph.capture(handle) if graph.building_function else handle)
        for variable in variables
        if variable.placement.owner is not None
        for handle in (variable.storage.first.handle,)
    }
    running = [op for op in ops if not _tf.is_abandoned(op)]
    writes = {op for op in running if _writes_only(op, owned)}
    roots = [leaf.op for leaf in leaves if tf.is_tensor(leaf)]
    roots += [
        op
        for op in running
        if op not in writes and (has_effect(op) or not REPLICA.search(op.name))
    ]
    needed_by_all = _ancestors(roots)
    return {op.name for op in _ancestors(writes) - needed_by_all}


def _writes_only(op: tf.Operation, owned: Set[int]) -> bool:
    """Whether an op writes variables with an owner, and nothing else."""
    if not has_effect(op) or not any(id(tensor) in owned for tensor in op.inputs):
        return False
    written = touched(op)[1]
    return bool(written) and written <= owned


def _ancestors(ops: Iterable[tf.Operation]) -> set[tf.Operation]:
    """Returns ops, and all whose values they are computed from."""
    found: set[tf.Operation] = set()
    stack = list(ops)
    while stack:
        op = stack.pop()
        if op not in found:
            found.add(op)
            stack += [tensor.op for tensor in op.inputs]
    return found
