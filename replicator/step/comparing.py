# SPDX-License-Identifier: Apache-2.0
"""Passes that compare the replicas: their calls, effects and writes."""

from __future__ import annotations

import collections

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.graph.ir.kinds import acting
from replicator.graph.lowering import rewrite
from replicator.graph.matching import unanswered
from replicator.graph.order import ordering
from replicator.graph.passes import owners, random
from replicator.graph.same.keys import Keys
from replicator.inputs import checks as input_checks
from replicator.inputs.shards import Shard
from replicator.step import checks
from replicator.step.draft import Draft
from replicator.variables import drift, elsewhere

_SAME_WRITES = (
    "let all hosts write the same values, computed from the same constants; make "
    "values that differ equal with repl.all_reduce or repl.broadcast."
)


def check_effects(draft: Draft) -> None:
    """Checks the replicas' side effects; copies have those of their originals."""
    build, factory = draft.build, draft.settings.factory
    compared = draft.replicas[: len(build.compared)]
    if draft.several:
        draft.active = acting(compared)
        checks.check_components(factory, draft.active, build)
        checks.check_writes(factory, draft.active, build)
        checks.check_circles(compared, build)
    random.check(draft.replicas, build.world.local)


def check_origins(draft: Draft) -> None:
    """Checks that a replica computes only with its own values, or equal ones."""
    if draft.several:
        compared = draft.replicas[: len(draft.build.compared)]
        checks.check_foreign(compared, _elements(draft), draft.build)
        checks.check_differentiated(
            draft.settings.factory, compared, draft.ops_before_step, draft.build
        )


def answer_messages(draft: Draft) -> None:
    """Supplies zero gradients for messages whose received value is never used."""
    build = draft.build
    ops = build.graph.get_operations()
    draft.first_lowered_op = len(ops)
    first = draft.ranges[0][0]
    draft.ops_before_replicas = [
        op for op in ops[:first] if not tf_ops.is_abandoned(op)
    ]
    if build.messages:
        draft.replicas = unanswered.answer(
            draft.replicas, draft.returned, build.world.local
        )


def check_equality(draft: Draft) -> None:
    """Checks that all calls pair up, and that no write lets replicas drift apart."""
    build, factory = draft.build, draft.settings.factory
    draft.initializers = ordering.with_sources(factory.initializers, draft.replicas)
    labels = Keys()
    owned = build.aliases.label(labels)
    draft.handles = owners.Handles(labels, owned, build.world)
    ops = set(draft.replicas[0]).difference(draft.initializers)
    draft.writes = any(draft.handles.written(op) for op in ops)
    activity = f"builds {input_checks.name_of(draft.step_fn)}"
    draft.calls_of_all = rewrite.check(
        draft.replicas, draft.handles, draft.settings.peers, activity
    )
    if draft.several:
        equal = drift.check(
            factory,
            build,
            draft.active,
            draft.initializers,
            _own_inputs(draft),
            draft.dividing,
        )
        if draft.settings.peers is not None:
            draft.settings.peers.check_equal("writes variables", equal, _SAME_WRITES)
            used_variables = {
                id(variable): variable for variable in build.aliases.recorded().values()
            }
            elsewhere.check_equal(draft.settings.peers, used_variables.values())


def _elements(draft: Draft) -> list[list[tf.Tensor]]:
    """Returns the inputs and arguments that only one replica has, for each replica."""
    nests = [
        element.element if isinstance(element, Shard) else element
        for element in draft.elements or [None] * len(draft.extra_args)
    ]
    tensors_by_replica = [
        list(filter(tf.is_tensor, tf.nest.flatten(nest, expand_composites=True)))
        for nest in zip(nests, draft.extra_args, strict=True)
    ]
    count = collections.Counter(
        ident
        for tensors in tensors_by_replica
        for ident in {id(tensor) for tensor in tensors}
    )
    return [
        [tensor for tensor in tensors if count[id(tensor)] == 1]
        for tensors in tensors_by_replica
    ]


def _own_inputs(draft: Draft) -> set[int] | None:
    """Returns the ids of a replica's own inputs, if it is the only one built here."""
    world = draft.build.world
    if world.num_local > 1 or world.num_replicas == 1:
        return None
    inputs = (draft.elements, list(draft.own_args))
    return set(map(id, tf.nest.flatten(inputs, expand_composites=True)))
