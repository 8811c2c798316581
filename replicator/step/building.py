# SPDX-License-Identifier: Apache-2.0
"""Builds a step, and rebuilds it whenever an attempt learns facts the next one needs.

The passes of an attempt are listed in passes.py.
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
from replicator.graph.passes import owners
from replicator.inputs import checks, feeds
from replicator.primitives import table
from replicator.step import passes
from replicator.step.draft import BuiltStep, Draft, Settings
from replicator.variables.creation import VariableFactory


def build_step(
    settings: Settings,
    step_fn: Callable[..., Any],
    feed: feeds.Feed | None,
    graph: tf.Graph,
    step_key: Any,
    args: Callable[[], Sequence[Any]],
    own_args: Sequence[Any] = (),
) -> BuiltStep:
    """Builds a step into `graph`, with all of its communication in place.

    Args:
        settings: What all steps of the Replicator share.
        step_fn: The user's function, of one element if there is a feed.
        feed: Gives each replica its element.
        graph: The default graph.
        step_key: Identifies step_fn in all builds of it, and is freed with it.
        args: Returns the extra arguments of step_fn, a tuple for each replica.
        own_args: The tensors in these arguments that belong to one replica only.
    """
    effects.order_captured_twice()
    with (
        functional.control_flow(),
        peers.telling(settings.peers),
        _without_garbage_collection(),
    ):
        step = _build_until_known(
            settings,
            graph,
            step_key,
            lambda build: Draft(settings, step_fn, feed, build, args, own_args),
        )
        if settings.peers is not None:  # none may run a step another failed to build
            settings.peers.exchange(f"has built {checks.name_of(step_fn)}", None)
        return step


def _build_until_known(
    settings: Settings,
    graph: tf.Graph,
    step_key: Any,
    draft: Callable[[context.Build], Draft],
) -> BuiltStep:
    """Builds a step, and rebuilds it while attempts learn facts the next one needs."""
    knowledge: dict[Any, Any] = {}
    created: dict[str, context.Created] = {}
    recorded: dict[int, Any] = {}
    while True:
        knowledge_before = dict(knowledge)
        start = graphs.operation_count(graph)
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
        try:
            with _creating_variables(settings.factory), effects.ordered_branches(graph):
                return passes.run(draft(build))
        except context.BuildAgain:
            _abandon(graph, start)
            assert knowledge != knowledge_before, (
                "a build that learned nothing asked for another"
            )
            recorded = build.aliases.recorded()
        except BaseException:
            _abandon(graph, start)
            raise
        finally:
            build.traces.forget()


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
