# SPDX-License-Identifier: Apache-2.0
"""Passes that finish a step that is checked: communication, effects, results.

Communication is lowered, with optimizations that need it lowered.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import choice
from replicator._tf import ops as tf_ops
from replicator.costs import cost, hosts
from replicator.graph.ir.kinds import acting, has_effect
from replicator.graph.lowering import crossing, rewrite
from replicator.graph.matching import leftover
from replicator.graph.order import ordering, phases, shared_resources
from replicator.graph.passes import kernels, owners, reads
from replicator.primitives import table
from replicator.step import outputs
from replicator.step.known import Attempt, Checked, Inputs, Traced, ops_before
from replicator.variables import in_graphs, storage

_WRITTEN_BY_ONE_OP = "written by one op together with variables elsewhere"


def lower(attempt: Attempt, traced: Traced, checked: Checked) -> rewrite.Rewritten:
    """Replaces placeholders by real ops."""
    build, peers = attempt.build, attempt.settings.peers
    ways = None
    if peers is not None and checked.calls_of_all is not None:
        ways = crossing.Ways(checked.calls_of_all, peers.process, peers.order)
    try:
        rewritten = rewrite.rewrite(
            traced.replicas,
            build.world,
            table.LOWERINGS,
            checked.initializers,
            build.options.policy,
            checked.handles,
            ways,
        )
    except owners.SeveralOwners as several:
        needs = [
            storage.Need(shared.variable, _WRITTEN_BY_ONE_OP, errors.line_of(op))
            for op, written in several.found
            for shared in written
        ]
        storage.mirror(build, needs)
    build.aliases.resolve()
    return rewritten


def read_once(
    attempt: Attempt, checked: Checked, lowered: rewrite.Rewritten
) -> rewrite.Rewritten:
    """Removes repeated reads and joins of variables; reads only rows that are used."""
    build, initializers = attempt.build, checked.initializers
    reads.join_reads(acting(lowered.replicas), initializers)
    replicas = reads.read_rows(lowered.replicas, initializers)
    reads.share_reads(acting(replicas), initializers, build.aliases.by_all)
    reads.share_joins(replicas, _near(build.world.devices), initializers)
    replicas = reads.leave_out_unused(replicas, initializers)
    return dataclasses.replace(lowered, replicas=replicas)


def _near(devices: Sequence[str]) -> list[list[int]]:
    """Returns the positions of replicas that share memory, where there are several."""
    by_host = [places for places in hosts.by_host(devices) if len(places) > 1]
    return [
        places for places in by_host if cost.share_memory([devices[n] for n in places])
    ]


def transpose_products(attempt: Attempt, lowered: rewrite.Rewritten) -> None:
    """Transposes matrix products that are slow on CPUs."""
    if attempt.build.options.kernels:
        kernels.replace(lowered.replicas)


def order_effects(
    attempt: Attempt,
    inputs: Inputs,
    traced: Traced,
    checked: Checked,
    lowered: rewrite.Rewritten,
) -> tf.Operation | None:
    """Orders a step's side effects, none of them before all inputs have arrived.

    Returns:
        In a plain tf.Graph, an op that runs when all effects have happened, if there
        are any; a function runs its effects by itself.
    """
    graph, initializers = attempt.build.graph, checked.initializers
    replicas = acting(lowered.replicas)
    new_ops = graph.get_operations()[checked.end :]
    merged = {op for ops in replicas for op in ops}.intersection(new_ops)
    added = [op for op in new_ops if op not in merged and not tf_ops.is_abandoned(op)]
    acts = [
        [op for op in ops if has_effect(op) and op not in initializers]
        for ops in (*replicas, added)
    ]
    if attempt.feed is not None and (ready := attempt.feed.ready(inputs.elements)):
        _wait(acts, ready)
    results = outputs.ops_of(traced.returned)
    fitting = attempt.build.ledger.optimizers_ops(graph) if attempt.several else None
    separate = functools.partial(
        phases.separate, initializers=initializers, fitting=fitting
    )
    if graph.building_function:
        is_last = choice.is_step(graph)
        before_step = ops_before(inputs.end, graph)
        ordering.order_in_function(replicas, added, before_step, initializers, is_last)
        shared_resources.order(replicas, initializers)
        must_run = [op for ops in acts for op in ops]
        end = None if is_last else ordering.marker("written")
        before = ops_before(inputs.begin, graph)
        separate([*must_run, *results], ops_before_step=before, end=end)
        return None
    must_run = ordering.order_in_session(replicas, added, initializers)
    shared_resources.order(replicas, initializers)
    separate([*must_run, *results])
    return tf.group(*must_run, name="step") if must_run else None


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


def seal_results(
    attempt: Attempt, traced: Traced, completion: tf.Operation | None
) -> list[Any]:
    """Prepares the results of step_fn for use outside the step."""
    returned = [*traced.returned]
    if attempt.several:
        returned = tf.nest.map_structure(outputs.seal, returned)
    if not attempt.build.graph.building_function:
        # Whatever is fetched, the whole step runs on all replicas: half a step would
        # let their variables drift apart.
        returned = tf.nest.map_structure(
            lambda leaf: outputs.after(completion, leaf), returned
        )
    return returned


def check_initialized(attempt: Attempt, inputs: Inputs, checked: Checked) -> None:
    """Asserts in a tf.Graph that components created later on have values.

    A session that ran the variables' initializers before has not initialized them.
    """
    late = [v for v in attempt.variables() if v.storage.late]
    if late:
        ops = set(attempt.build.graph.get_operations()[inputs.end :])
        in_graphs.assert_initialized(late, ops - checked.initializers)


def check_leftovers(attempt: Attempt, inputs: Inputs, returned: Sequence[Any]) -> None:
    """Raises an error if a placeholder is left in the step."""
    leftover.check(attempt.build.graph.get_operations()[inputs.end :], returned)
