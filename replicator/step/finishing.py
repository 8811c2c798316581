# SPDX-License-Identifier: Apache-2.0
"""Passes that order the effects of a step, and make its results fit to leave it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import has_effect
from replicator.graph.matching import leftover
from replicator.graph.order import in_turn, ordering, phases
from replicator.step import outputs
from replicator.step.draft import Draft


def order_effects(draft: Draft) -> None:
    """Orders the side effects of a step, none before all inputs are there.

    In a plain tf.Graph there is an op then that runs when all effects have happened, if
    there are any; a function runs them by itself.
    """
    lowered = draft.build.graph.get_operations()[draft.own :]
    feed, fed = draft.feed, draft.elements is not None
    ready = feed.ready(draft.elements) if feed is not None and fed else []
    replicas, initializers, flow = draft.active, draft.initializers, draft.flow
    merged = {op for ops in replicas for op in ops}.intersection(lowered)
    added = [op for op in lowered if op not in merged and not _tf.is_abandoned(op)]
    own = [*replicas, added]
    acts = [
        [op for op in ops if has_effect(op) and op not in initializers] for ops in own
    ]
    if ready:
        _wait(acts, ready, flow)
    results = [
        leaf.op if tf.is_tensor(leaf) else leaf
        for leaf in draft.leaves()
        if leaf is not None
    ]
    graph, ledger = draft.build.graph, draft.build.ledger
    fitting = ledger.optimizers_ops(graph) if draft.several else None
    separate = functools.partial(
        phases.separate, left_out=initializers, flow=flow, fitting=fitting
    )
    if graph.building_function:
        before = ordering.order_in_function(
            replicas, added, merged, draft.earlier, initializers, bool(draft.sharing)
        )
        in_turn.take(replicas, initializers, before, flow)
        must_run = [op for ops in acts for op in ops]
        end = None if _tf.is_step(graph) else ordering.marker("written")
        separate([*must_run, *results], before, earlier=draft.previous, end=end)
        return
    must_run = ordering.order_in_session(replicas, added, initializers, flow)
    in_turn.take(replicas, initializers, {}, flow)
    separate([*must_run, *results], {})
    done = flow.after(must_run)
    draft.done = tf.group(*done, name="step") if done else None


def _wait(
    acts: Sequence[Sequence[tf.Operation]],
    ready: Sequence[tf.Operation],
    flow: switching.Flow,
) -> None:
    """Lets ops with effects, those of each replica, wait until all inputs are there."""
    for ops in acts:
        if ops:
            with tf.device(ops[0].device), tf.control_dependencies(ready):
                gate = tf.no_op("inputs_are_there")  # one edge between two devices
            for op in ops:
                flow.let_wait(op, [gate])


def seal_results(draft: Draft) -> None:
    """Makes what step_fn returned fit to leave the step."""
    if draft.several:
        draft.returned = tf.nest.map_structure(outputs.seal, draft.returned)
    if not draft.build.graph.building_function:
        # Whatever is fetched, the whole step happens, on all replicas: half of it would
        # let their variables drift apart.
        draft.returned = tf.nest.map_structure(
            lambda leaf: outputs.after(draft.done, leaf), draft.returned
        )


def check_leftovers(draft: Draft) -> None:
    """Refuses a step in which a placeholder is left."""
    leftover.check(draft.ops(), draft.returned)
