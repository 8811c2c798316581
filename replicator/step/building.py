# SPDX-License-Identifier: Apache-2.0
"""Builds a step, once more whenever an attempt learns what the next has to know.

What an attempt does is the list of passes in passes.py.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context
from replicator.cluster import peers
from replicator.graph.passes import owners
from replicator.inputs import checks, feeds
from replicator.primitives import table
from replicator.step import passes
from replicator.step.draft import Built, Draft, Settings
from replicator.variables.creation import VariableFactory


def build_step(
    settings: Settings,
    step_fn: Callable[..., Any],
    feed: feeds.Feed | None,
    graph: tf.Graph,
    step_key: Any,
    args: Callable[[], Sequence[Any]],
    own: Sequence[Any] = (),
) -> Built:
    """Builds a step into `graph`, with all of its communication in place.

    Args:
        settings: What all steps of the Replicator share.
        step_fn: The user's function, of one element if there is a feed.
        feed: Gives each replica its element.
        graph: The default graph.
        step_key: Stands for step_fn in all builds of it, and goes with it.
        args: Returns the further arguments of step_fn, a tuple for each replica.
        own: Those of the tensors behind them that a replica is given for itself.
    """
    with peers.telling(settings.peers), _collecting_later():
        built = _build_until_known(
            *(settings, graph, step_key),
            lambda build: Draft(settings, step_fn, feed, build, args, own),
        )
        if settings.peers is not None:  # else one would run what another cannot
            settings.peers.exchange(f"has built {checks.name_of(step_fn)}", None)
        return built


def _build_until_known(
    settings: Settings,
    graph: tf.Graph,
    step_key: Any,
    draft: Callable[[context.Build], Draft],
) -> Built:
    """Builds, once more whenever an attempt learns what the next has to know."""
    knowledge: dict[Any, Any] = {}
    created: dict[str, context.Created] = {}
    noted: dict[int, Any] = {}
    while True:
        known = dict(knowledge)
        start = _tf.operation_count(graph)
        build = context.Build(
            settings.world,
            settings.options,
            graph,
            settings.ledger,
            owners.Aliases(graph, settings.world, noted),
            table.GRADIENTS,
            table.FACTS,
            knowledge,
            step_key=step_key,
            created=created,
        )
        try:
            with _creating_variables(settings.factory), _tf.ordered_branches(graph):
                return passes.run(draft(build))
        except context.BuildAgain:
            _abandon(graph, start)
            assert knowledge != known, "a build that learned nothing asked for another"
            noted = build.aliases.noted()
        except BaseException:
            _abandon(graph, start)
            raise
        finally:
            build.traces.forget()


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """In this block, Python does not look for garbage.

    All that a build makes stays, and looking through it again and again takes a tenth
    of the time of a large build.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _abandon(graph: tf.Graph, start: int) -> None:
    """Leaves a failed build without effects on what is built into the graph later."""
    if graph.building_function:
        ops = graph.get_operations()[start:]
        _tf.abandon([op for op in ops if _tf.is_stateful(op)])
        # A function without anything that must run would run all that has an effect.
        _tf.run_independently(graph, tf.no_op())


@contextlib.contextmanager
def _creating_variables(factory: VariableFactory) -> Iterator[None]:
    """In this block, new variables are replicated, whichever graph they are put in."""
    with contextlib.ExitStack() as stack:
        with (
            tf.init_scope()
        ):  # where Keras creates variables while a function is traced
            stack.enter_context(_tf.last_variable_creator(factory.creator))
        stack.enter_context(_tf.last_variable_creator(factory.creator))
        yield


@contextlib.contextmanager
def replicated_variables(factory: VariableFactory) -> Iterator[None]:
    """What `Replicator.context()` does: new variables get one component per replica."""
    if context.current() is not None:
        yield  # inside a step they do anyway
        return
    with _creating_variables(factory):
        yield
