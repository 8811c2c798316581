# SPDX-License-Identifier: Apache-2.0
"""Passes that compare the replicas: their calls, effects and writes."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import tensorflow as tf

from replicator._tf import graphs
from replicator.graph.ir.kinds import acting
from replicator.graph.lowering import rewrite
from replicator.graph.order import ordering
from replicator.graph.passes import owners, random
from replicator.graph.same.keys import Keys
from replicator.inputs import checks as input_checks
from replicator.inputs.shards import Shard
from replicator.step import checks, foreign
from replicator.step.known import Attempt, Checked, Inputs, Traced, ops_before
from replicator.variables import drift, elsewhere

_SAME_WRITES = (
    "let all hosts write the same values, computed from the same constants; make "
    "values that differ equal with repl.all_reduce or repl.broadcast."
)


def check_effects(attempt: Attempt, traced: Traced) -> None:
    """Checks the replicas' side effects; copies have those of their originals."""
    build, factory = attempt.build, attempt.settings.factory
    if attempt.several:
        compared = _compared(attempt, traced)
        active = acting(compared)
        checks.check_places(compared, build)
        checks.check_components(factory, active, build)
        checks.check_writes(factory, active, build)
        checks.check_circles(compared, build)
    random.check(traced.replicas, build.world.local)


def check_origins(attempt: Attempt, inputs: Inputs, traced: Traced) -> None:
    """Checks that a replica computes only with its own values, or equal ones."""
    if attempt.several:
        build, compared = attempt.build, _compared(attempt, traced)
        foreign.check_uses(compared, _elements(inputs), build)
        before = ops_before(inputs.begin, build.graph)
        foreign.check_gradients(attempt.settings.factory, compared, before, build)


def _compared(attempt: Attempt, traced: Traced) -> Sequence[Sequence[tf.Operation]]:
    """Returns the ops of the replicas that are compared: of copies, the first."""
    return traced.replicas[: len(attempt.build.compared)]


def check_equality(attempt: Attempt, inputs: Inputs, traced: Traced) -> Checked:
    """Checks that all calls pair up, and that no write lets replicas drift apart."""
    build, factory = attempt.build, attempt.settings.factory
    peers = attempt.settings.peers
    initializers = ordering.with_sources(factory.initializers, traced.replicas)
    labels = Keys()
    handles = owners.Handles(labels, build.aliases.label(labels), build.world)
    ops = set(traced.replicas[0]).difference(initializers)
    writes = any(handles.written(op) for op in ops)
    activity = f"builds {input_checks.name_of(attempt.step_fn)}"
    calls_of_all = rewrite.check(traced.replicas, handles, peers, activity)
    if attempt.several:
        equal = drift.check(
            factory,
            build,
            acting(_compared(attempt, traced)),
            initializers,
            _own_inputs(attempt, inputs),
            inputs.dividing,
        )
        if peers is not None:
            peers.check_equal("writes variables", equal, _SAME_WRITES)
            elsewhere.check_equal(peers, attempt.variables())
    end = graphs.operation_count(build.graph)
    return Checked(initializers, handles, writes, calls_of_all, end)


def _elements(inputs: Inputs) -> list[list[tf.Tensor]]:
    """Returns the inputs and arguments that only one replica has, for each replica."""
    nests = [
        element.element if isinstance(element, Shard) else element
        for element in inputs.elements
    ]
    tensors_by_replica = [
        list(filter(tf.is_tensor, tf.nest.flatten(nest, expand_composites=True)))
        for nest in zip(nests, inputs.extra_args, strict=True)
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


def _own_inputs(attempt: Attempt, inputs: Inputs) -> set[int] | None:
    """Returns the ids of a replica's own inputs, if it is the only one built here."""
    world = attempt.build.world
    if world.num_local > 1 or world.num_replicas == 1:
        return None
    own = (inputs.elements, list(attempt.own_args))
    return set(map(id, tf.nest.flatten(own, expand_composites=True)))
