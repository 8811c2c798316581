# SPDX-License-Identifier: Apache-2.0
"""Finds the ops that run once for all replicas, however many there are.

Of the writes to a variable that has an owner, only the owner's remains (owners.py), and
with it the ops that compute nothing else: the optimizer's work. All other replicas omit
them. Ops of no single replica, such as communication, are needed by all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence, Set
from typing import Any

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.graph.ir import walk
from replicator.graph.ir.kinds import has_effect, touched

REPLICA = re.compile(r"(?:^|/)replica_(\d+)/")  # in the names of a replica's ops


def names(
    ops: Sequence[tf.Operation],
    leaves: Iterable[Any],
    variables: Collection[Any],
    graph: Any,
) -> set[str]:
    """Returns the names of the ops that run once, for all replicas.

    Args:
        ops: The ops of a built step.
        leaves: The results of the step.
        variables: The ReplicatedVariables that it uses.
        graph: The graph that it is built into.
    """
    owned = {
        id(graph.capture(handle) if graph.building_function else handle)
        for variable in variables
        if variable.placement.owner is not None
        for handle in (variable.storage.first.handle,)
    }
    running = [op for op in ops if not tf_ops.is_abandoned(op)]
    writes = {op for op in running if _writes_only(op, owned)}
    roots = [leaf.op for leaf in leaves if tf.is_tensor(leaf)]
    roots += [
        op
        for op in running
        if op not in writes and (has_effect(op) or not REPLICA.search(op.name))
    ]
    needed_by_all = walk.upstream(roots, walk.computed_from)
    needed = walk.upstream(writes, walk.computed_from)
    return {op.name for op in needed - needed_by_all}


def _writes_only(op: tf.Operation, owned: Set[int]) -> bool:
    """Whether an op writes variables with an owner, and nothing else."""
    if not has_effect(op) or not any(id(tensor) in owned for tensor in op.inputs):
        return False
    written = touched(op)[1]
    return bool(written) and written <= owned
