# SPDX-License-Identifier: Apache-2.0
"""Passes that call step_fn and assign the ops to the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import context, errors
from replicator._tf import graphs
from replicator._tf import ops as tf_ops
from replicator.graph.ir import functional, shapes
from replicator.graph.matching import numbering
from replicator.graph.passes import identities, ties
from replicator.inputs import feeds
from replicator.inputs.shards import Shard
from replicator.step import (
    checks,
    constants,
    copies,
    objects,
    scopes,
    step_arguments,
    tracing,
)
from replicator.step.draft import Draft
from replicator.variables import python_calls, storage, unbuilt


def pull_inputs(draft: Draft) -> None:
    """Pulls each replica's inputs, before anything else is built."""
    ops = draft.build.graph.get_operations()
    draft.ops_before_step = [op for op in ops if not tf_ops.is_abandoned(op)]
    with tf.name_scope(feeds.SCOPE):
        draft.elements = None if draft.feed is None else draft.feed.pull()
        if draft.feed is not None and draft.feed.divides:
            pulled = draft.build.graph.get_operations()[len(ops) :]
            draft.dividing = frozenset(pulled)
        draft.extra_args = draft.args()
        if draft.several and draft.feed is not None and draft.feed.divides:
            _warn_of_whole_args(draft)
        if not draft.build.all_traced:
            draft.elements, draft.extra_args = _hidden(draft.elements, draft.extra_args)


def _warn_of_whole_args(draft: Draft) -> None:
    """Warns once if replicas get all of an argument with one row per example."""
    total = tf.get_static_value(draft.elements[0].total)
    for number, arg in enumerate(draft.extra_args[0]):
        for leaf in tf.nest.flatten(arg):
            rows = shapes.static(leaf) if isinstance(leaf, tf.Tensor) else None
            if total is None or not rows or rows[0] != total:
                continue
            if any(leaf.op.inputs[0] is tensor for tensor in draft.own_args):
                continue
            logging.log_first_n(
                logging.WARNING,
                "args[%d] at %s has %d rows, as many as the batch that is split has "
                "examples, but each replica is given all of it. What belongs to the "
                "examples must be part of the batch: repl.run(step_fn, (x, y), "
                'input_mode="global_batch"), where step_fn(x, y) takes the parts.',
                1,
                number,
                errors.user_line(),
                total,
            )


def _hidden(elements: Any, extra_args: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns inputs from which copies may take replica 1's static shapes."""
    nests = copies.hide_values(
        [*zip(elements or [None] * len(extra_args), extra_args, strict=True)]
    )
    hidden = [nest[0] for nest in nests]
    return None if elements is None else hidden, [nest[1] for nest in nests]


def call_step_fn(draft: Draft) -> None:
    """Calls step_fn in replica order, once per replica or, with copies, once."""
    build = draft.build
    seeds = graphs.seeds_counted(build.graph)
    large = constants.Constants(build)
    for n, replica_id in enumerate(build.traced):
        if n == 1:
            copies.bring_handles(draft.settings.factory, build)
        start = graphs.operation_count(build.graph)
        graphs.count_seeds_from(build.graph, seeds)  # random.py separates the replicas'
        # From Python 3.12 on, contextlib.suppress would copy step_fn's ExceptionGroups.
        try:
            arguments, shard = _arguments(draft, n)
            outputs, scope = tracing.build_replica(
                draft.step_fn, arguments, build, replica_id, large, shard
            )
            draft.returned.append(outputs)
            draft.scopes.append(scope)
        except context.Waiting:
            pass
        storage.meet_needs(build)
        draft.ranges.append((start, graphs.operation_count(build.graph)))
    draft.collected = scopes.return_collected(build)


def _arguments(draft: Draft, n: int) -> tuple[list[Any], Shard | None]:
    """Returns step_fn's arguments, and the replica's part of a global batch, if any."""
    extra_args = draft.extra_args[n]
    if draft.elements is None:
        return list(extra_args), None
    element, shard = draft.elements[n], None
    if draft.feed is not None and draft.feed.divides:
        shard = element
        element = shard.element
    return step_arguments.arranged(draft.step_fn, element, extra_args), shard


def check_results(draft: Draft) -> None:
    """Checks what replicas exchanged while they were built, and what they returned."""
    functional.refuse_raw(draft.ops())
    objects.check(draft.build, draft.settings.peers)
    unbuilt.check(draft.build)
    checks.check_outputs(draft.returned, draft.build.world, draft.step_fn)


def divide_ops(draft: Draft) -> None:
    """Determines which ops belong to which replica."""
    build, ops = draft.build, draft.build.graph.get_operations()
    aliases = build.aliases.ops()
    draft.replicas = [
        [op for op in ops[begin:end] if op not in aliases]
        for begin, end in draft.ranges
    ]
    for replica in draft.replicas:
        identities.see_through(replica)
    draft.replicas = ties.resolve(
        draft.replicas,
        build.traced,
        [leaf for leaf in draft.leaves() if tf.is_tensor(leaf)],
        draft.settings.factory.in_parts(),
        draft.settings.factory.initializers,
    )
    if build.in_functions:
        numbering.close_gaps(draft.replicas, build.traced)
    python_calls.note(draft.replicas, build.world.num_local)


def copy_replicas(draft: Draft) -> None:
    """Adds copies for the replicas for which step_fn was not called."""
    build = draft.build
    if build.all_traced:
        return
    elements = draft.elements or [None] * build.world.num_local
    clones = copies.make(
        draft.settings.factory,
        build,
        [*zip(elements, draft.extra_args, strict=True)],
        draft.replicas[0],
        (draft.returned[0], [item for _, item in draft.collected]),
        draft.scopes[0],
    )
    for ops, (returned, items) in clones:
        draft.replicas = [*draft.replicas, ops]
        draft.returned.append(returned)
        for (key, _), item in zip(draft.collected, items, strict=True):
            build.graph.add_to_collection(key, item)
