# SPDX-License-Identifier: Apache-2.0
"""Passes that order a step's effects and prepare its results for use outside."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from replicator._tf import choice
from replicator._tf import ops as tf_ops
from replicator.graph.ir.kinds import has_effect
from replicator.graph.matching import leftover
from replicator.graph.order import ordering, phases, shared_resources
from replicator.step import outputs
from replicator.step.draft import Draft
from replicator.variables import in_graphs


def order_effects(draft: Draft) -> None:
    """Orders a step's side effects, none of them before all inputs have arrived.

    In a plain tf.Graph this adds an op that runs when all effects have happened, if
    there are any; a function runs its effects by itself.
    """
    lowered = draft.build.graph.get_operations()[draft.first_lowered_op :]
    feed, fed = draft.feed, draft.elements is not None
    ready = feed.ready(draft.elements) if feed is not None and fed else []
    replicas, initializers = draft.active, draft.initializers
    merged = {op for ops in replicas for op in ops}.intersection(lowered)
    added = [op for op in lowered if op not in merged and not tf_ops.is_abandoned(op)]
    groups = [*replicas, added]
    acts = [
        [op for op in ops if has_effect(op) and op not in initializers]
        for ops in groups
    ]
    if ready:
        _wait(acts, ready)
    results = [
        leaf.op if tf.is_tensor(leaf) else leaf
        for leaf in draft.leaves()
        if leaf is not None
    ]
    graph, ledger = draft.build.graph, draft.build.ledger
    fitting = ledger.optimizers_ops(graph) if draft.several else None
    separate = functools.partial(
        phases.separate, initializers=initializers, fitting=fitting
    )
    if graph.building_function:
        order = ordering.order_in_function(
            replicas,
            added,
            merged,
            draft.ops_before_replicas,
            initializers,
            bool(draft.sharing),
        )
        shared_resources.order(replicas, initializers, order)
        must_run = [op for ops in acts for op in ops]
        end = None if choice.is_step(graph) else ordering.marker("written")
        separate(
            [*must_run, *results], order, ops_before_step=draft.ops_before_step, end=end
        )
        return
    must_run = ordering.order_in_session(replicas, added, initializers)
    shared_resources.order(replicas, initializers, {})
    separate([*must_run, *results], {})
    draft.completion = tf.group(*must_run, name="step") if must_run else None


def _wait(
    acts: Sequence[Sequence[tf.Operation]], ready: Sequence[tf.Operation]
) -> None:
    """Makes each replica's ops with effects wait until all inputs have arrived."""
    for ops in acts:
        if ops:
            with tf.device(ops[0].device), tf.control_dependencies(ready):
                # One op per replica, so that few edges go between devices.
                gate = tf.no_op("inputs_are_there")
            for op in ops:
                tf_ops.add_control_inputs(op, [gate])


def seal_results(draft: Draft) -> None:
    """Prepares the results of step_fn for use outside the step."""
    if draft.several:
        draft.returned = tf.nest.map_structure(outputs.seal, draft.returned)
    if not draft.build.graph.building_function:
        # Whatever is fetched, the whole step runs on all replicas: half a step would
        # let their variables drift apart.
        draft.returned = tf.nest.map_structure(
            lambda leaf: outputs.after(draft.completion, leaf), draft.returned
        )


def check_initialized(draft: Draft) -> None:
    """Asserts in a tf.Graph that components created later on have values.

    A session that ran the variables' initializers before has not initialized them.
    """
    variables = draft.build.aliases.recorded().values()
    late = {id(v): v for v in variables if v.storage.late}.values()
    if late:
        in_graphs.assert_initialized(late, set(draft.ops()) - draft.initializers)


def check_leftovers(draft: Draft) -> None:
    """Raises an error if a placeholder is left in the step."""
    leftover.check(draft.ops(), draft.returned)
