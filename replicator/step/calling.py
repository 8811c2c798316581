# SPDX-License-Identifier: Apache-2.0
"""Passes that call step_fn and assign the ops to the replicas, up to Traced."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import context, errors
from replicator._tf import graphs
from replicator.graph.ir import functional, shapes
from replicator.graph.matching import numbering
from replicator.graph.passes import identities, joinable_calls, ties
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
from replicator.step.known import Attempt, Inputs, Traced
from replicator.variables import decisions, python_calls, storage, unbuilt
from replicator.variables.chooser import SparseGradients


def note_undecided(attempt: Attempt) -> dict[str, storage.Settlement | None]:
    """Records where earlier code uses variables that await a strategy's decision.

    Returns:
        For each of these variables, by its path: where code was built that uses its
        components.
    """
    if attempt.settings.chooser is None:
        return {}
    return {
        path: undecided.settlement
        for path, variable in attempt.settings.factory.trained().items()
        if (undecided := decisions.undecided(variable)) is not None
    }


def pull_inputs(attempt: Attempt) -> Inputs:
    """Pulls each replica's inputs, before anything else is built."""
    build, feed = attempt.build, attempt.feed
    begin = graphs.operation_count(build.graph)
    dividing: list[tf.Operation] = []
    with tf.name_scope(feeds.SCOPE):
        elements: list[Any] = [None] * build.world.num_local
        if feed is not None:
            elements = feed.pull()
            if feed.divides:
                dividing = build.graph.get_operations()[begin:]
        extra_args = attempt.args()
        if dividing and attempt.several:
            _warn_of_whole_args(elements[0].total, extra_args[0], attempt.own_args)
        if not build.all_traced:
            nests = copies.hide_values([*zip(elements, extra_args, strict=True)])
            elements, extra_args = map(list, zip(*nests, strict=True))
    end = graphs.operation_count(build.graph)
    return Inputs(elements, extra_args, frozenset(dividing), begin, end)


def _warn_of_whole_args(
    num_examples: tf.Tensor, args: Sequence[Any], own_args: Sequence[Any]
) -> None:
    """Warns once if replicas get all of an argument with one row per example."""
    total = tf.get_static_value(num_examples)
    for number, arg in enumerate(args):
        for leaf in tf.nest.flatten(arg):
            rows = shapes.static(leaf) if isinstance(leaf, tf.Tensor) else None
            if total is None or not rows or rows[0] != total:
                continue
            if any(leaf.op.inputs[0] is tensor for tensor in own_args):
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


def call_step_fn(attempt: Attempt, inputs: Inputs) -> Traced:
    """Calls step_fn in replica order, once per replica or, with copies, once."""
    build, graph = attempt.build, attempt.build.graph
    seeds = graphs.seeds_counted(graph)
    large = constants.Constants(build)
    returned, scope_names, ranges = [], [], []
    for n, replica_id in enumerate(build.traced):
        if n == 1:
            copies.bring_handles(attempt.settings.factory, build)
        start = graphs.operation_count(graph)
        graphs.count_seeds_from(graph, seeds)  # random.py separates the replicas'
        # From Python 3.12 on, contextlib.suppress would copy step_fn's ExceptionGroups.
        try:
            arguments, shard = _arguments(attempt, inputs, n)
            outputs, scope = tracing.build_replica(
                attempt.step_fn, arguments, build, replica_id, large, shard
            )
            returned.append(outputs)
            scope_names.append(scope)
        except context.Waiting:
            pass
        storage.meet_needs(build)
        ranges.append((start, graphs.operation_count(graph)))
    collected = scopes.return_collected(build)
    ops = graph.get_operations()
    replicas = [ops[start:end] for start, end in ranges]
    return Traced(returned, replicas, scope_names, collected)


def _arguments(
    attempt: Attempt, inputs: Inputs, n: int
) -> tuple[list[Any], Shard | None]:
    """Returns step_fn's arguments, and the replica's part of a global batch, if any."""
    element, extra_args = inputs.elements[n], inputs.extra_args[n]
    if attempt.feed is None:
        return list(extra_args), None
    shard = element if attempt.feed.divides else None
    if shard is not None:
        element = shard.element
    return step_arguments.arranged(attempt.step_fn, element, extra_args), shard


def follow_strategy(
    attempt: Attempt, undecided: Mapping[str, storage.Settlement | None]
) -> None:
    """Applies a strategy's decisions on variables that it could not decide on before.

    Args:
        attempt: What is given.
        undecided: The result of `note_undecided`.

    Raises:
        BuildAgain: Some have moved, or are kept equal in another way.
        StrategyError: A rule of the strategy matches no variable.
    """
    chooser, factory = attempt.settings.chooser, attempt.settings.factory
    if chooser is None:
        return
    run = chooser.run
    run.check()
    variables = factory.trained()
    sparse = attempt.build.states.of(SparseGradients)
    run.sparse |= {p: sparse[v.key] for p, v in variables.items() if v.key in sparse}
    still_undecided = set()
    for path, variable in variables.items():
        undecided_storage = decisions.undecided(variable)
        if undecided_storage is not None:
            still_undecided.add(path)
            # An optimizer has read it to create its slots, but only in this step.
            undecided_storage.settlement = undecided.get(path)
    changed = [
        path
        for path, decision in run.decide(still_undecided).items()
        if decisions.follow(factory.divide_again, variables[path], decision)
    ]
    if changed:
        attempt.build.knowledge.update({("decided", path): True for path in changed})
        raise context.BuildAgain


def check_results(attempt: Attempt, traced: Traced) -> None:
    """Checks what replicas exchanged while they were built, and what they returned."""
    functional.refuse_raw([op for ops in traced.replicas for op in ops])
    objects.check(attempt.build, attempt.settings.peers)
    unbuilt.check(attempt.build)
    checks.check_outputs(traced.returned, attempt.build.world, attempt.step_fn)


def divide_ops(attempt: Attempt, traced: Traced) -> Traced:
    """Determines which ops belong to which replica."""
    build, factory = attempt.build, attempt.settings.factory
    aliases = build.aliases.ops()
    replicas = [[op for op in ops if op not in aliases] for ops in traced.replicas]
    for replica in replicas:
        identities.see_through(replica)
    leaves = tf.nest.flatten(traced.returned, expand_composites=True)
    replicas = ties.resolve(
        replicas,
        build.traced,
        [leaf for leaf in leaves if tf.is_tensor(leaf)],
        factory.in_parts(),
        factory.initializers,
    )
    if build.in_functions:
        numbering.close_gaps(replicas, build.traced)
    python_calls.note(replicas, build.world.num_local)
    return dataclasses.replace(traced, replicas=replicas)


def join_calls(attempt: Attempt, traced: Traced) -> Traced:
    """Merges calls whose tensors may share messages."""
    if attempt.settings.peers is not None:
        return traced  # each process has to join the same ones
    replicas = joinable_calls.join(
        traced.replicas, traced.scopes, attempt.build.aliases.variable
    )
    return dataclasses.replace(traced, replicas=replicas)


def copy_replicas(attempt: Attempt, inputs: Inputs, traced: Traced) -> Traced:
    """Adds copies for the replicas for which step_fn was not called."""
    build = attempt.build
    if build.all_traced:
        return traced
    returned, replicas = [*traced.returned], [*traced.replicas]
    clones = copies.make(
        attempt.settings.factory,
        build,
        [*zip(inputs.elements, inputs.extra_args, strict=True)],
        replicas[0],
        (returned[0], [item for _, item in traced.collected]),
        traced.scopes[0],
    )
    for ops, (copied, items) in clones:
        replicas.append(ops)
        returned.append(copied)
        for (key, _), item in zip(traced.collected, items, strict=True):
            build.graph.add_to_collection(key, item)
    return dataclasses.replace(traced, returned=returned, replicas=replicas)
