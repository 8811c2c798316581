# SPDX-License-Identifier: Apache-2.0
"""Builds a step by passes, again whenever an attempt learns what the next one needs.

Each pass takes what it needs of what is known (known.py) and returns what it adds to
that; one that only checks returns nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator._tf import effects, graphs, variables
from replicator._tf import ops as tf_ops
from replicator.cluster import peers
from replicator.graph.ir import functional
from replicator.graph.passes import owners, pulls
from replicator.inputs import checks, feeds
from replicator.primitives import table
from replicator.step import stages
from replicator.step.calling import (
    call_step_fn,
    check_results,
    copy_replicas,
    divide_ops,
    follow_strategy,
    join_calls,
    note_undecided,
    pull_inputs,
)
from replicator.step.comparing import (
    check_effects,
    check_equality,
    check_origins,
)
from replicator.step.finishing import (
    check_initialized,
    check_leftovers,
    lower,
    order_effects,
    read_once,
    seal_results,
    transpose_products,
)
from replicator.step.known import Attempt, BuiltStep, Settings
from replicator.variables.creation import VariableFactory


def build_step(
    settings: Settings,
    step_fn: Callable[..., Any],
    feed: feeds.Feed | None,
    step_key: Any,
    args: Callable[[], Sequence[Any]],
    own_args: Sequence[Any] = (),
) -> BuiltStep:
    """Builds a step into the default graph, with all of its communication in place.

    Args:
        settings: What all steps of the Replicator share.
        step_fn: The user's function, of one element if there is a feed.
        feed: Gives each replica its element.
        step_key: Identifies step_fn in all builds of it, and is freed with it.
        args: Returns the extra arguments of step_fn, a tuple for each replica.
        own_args: The tensors in these arguments that belong to one replica only.
    """
    effects.order_captured_twice()
    graph = tf.compat.v1.get_default_graph()
    knowledge: dict[Any, Any] = {}
    created: dict[str, context.Created] = {}
    recorded: dict[int, Any] = {}
    step = None
    with (
        functional.control_flow(),
        peers.telling(settings.peers),
        _without_garbage_collection(),
    ):
        while step is None:
            build = context.Build(
                settings.world,
                settings.options,
                graph,
                settings.ledger,
                owners.Aliases(graph, settings.world, recorded),
                table.GRADIENTS,
                table.FACTS,
                knowledge,
                step_key=step_key,
                created=created,
            )
            step = _attempt(Attempt(settings, build, step_fn, feed, args, own_args))
            recorded = build.aliases.recorded()
        if settings.peers is not None:  # none may run a step another failed to build
            settings.peers.exchange(f"has built {checks.name_of(step_fn)}", None)
        return step


def _attempt(attempt: Attempt) -> BuiltStep | None:
    """Makes one attempt; returns None if the next one needs what it has learned."""
    build = attempt.build
    knowledge_before = dict(build.knowledge)
    start = graphs.operation_count(build.graph)
    try:
        with (
            _creating_variables(attempt.settings.factory),
            effects.ordered_branches(build.graph),
        ):
            return _build(attempt)
    except context.BuildAgain:
        _abandon(build.graph, start)
        assert build.knowledge != knowledge_before, (
            "a build that learned nothing asked for another"
        )
        return None
    except BaseException:
        _abandon(build.graph, start)
        raise
    finally:
        build.traces.forget()


def _build(attempt: Attempt) -> BuiltStep:
    """Builds a step by all passes, in order; `Replicator.stages` records it."""
    graph, recorders = attempt.build.graph, stages.begin(attempt)

    undecided = note_undecided(attempt)
    inputs = pull_inputs(attempt)
    traced = call_step_fn(attempt, inputs)
    follow_strategy(attempt, undecided)
    check_results(attempt, traced)
    traced = divide_ops(attempt, traced)
    for recorder in recorders:
        recorder.traced(graph, traced.replicas[0])
    traced = join_calls(attempt, traced)
    traced = copy_replicas(attempt, inputs, traced)
    for recorder in recorders:
        recorder.copied(graph, [op for ops in traced.replicas for op in ops])

    check_effects(attempt, traced)
    check_origins(attempt, inputs, traced)
    checked = check_equality(attempt, inputs, traced)

    lowered = lower(attempt, traced, checked)
    lowered = read_once(attempt, checked, lowered)
    transpose_products(attempt, lowered)

    completion = order_effects(attempt, inputs, traced, checked, lowered)
    returned = seal_results(attempt, traced, completion)
    check_initialized(attempt, inputs, checked)
    check_leftovers(attempt, inputs, returned)
    for recorder in recorders:
        recorder.finish(graph, stages.that_run(attempt, inputs, checked, returned))

    variables = attempt.variables()
    leaves = tf.nest.flatten(returned, expand_composites=True)
    pulled = pulls.nbytes(variables, graph, attempt.build.world, leaves, lowered.pruned)
    return BuiltStep(
        returned, lowered.communications, variables, checked.writes, pulled
    )


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disables Python's garbage collector in this block.

    Everything that a build creates stays alive, and scanning it again and again takes a
    tenth of the time of a large build.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _abandon(graph: tf.Graph, start: int) -> None:
    """Keeps a failed build from affecting what is built into the graph later."""
    if graph.building_function:
        ops = graph.get_operations()[start:]
        tf_ops.abandon([op for op in ops if effects.is_stateful(op)])
        # A function in which nothing must run would run every op with an effect.
        effects.run_independently(graph, tf.no_op())


@contextlib.contextmanager
def _creating_variables(factory: VariableFactory) -> Iterator[None]:
    """Replicates the variables created in this block, in any graph."""
    with contextlib.ExitStack() as stack:
        # In the init scope, Keras creates variables while a function is traced.
        with tf.init_scope():
            stack.enter_context(variables.last_variable_creator(factory.creator))
        stack.enter_context(variables.last_variable_creator(factory.creator))
        yield


@contextlib.contextmanager
def replicated_variables(factory: VariableFactory) -> Iterator[None]:
    """Implements `Replicator.context()`: new variables have a component per replica."""
    if context.current() is not None:
        yield  # inside a step they always do
        return
    with functional.control_flow(), _creating_variables(factory):
        yield
