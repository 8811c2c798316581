# SPDX-License-Identifier: Apache-2.0
"""State that a step keeps between its calls: the traced function and the inputs.

The traces are dropped when names that step_fn reads refer to something else.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.inputs import feeds, positions
from replicator.report import plan as plans
from replicator.step import cache, names_read
from replicator.variables import locks

StepCall = Callable[
    [Sequence[Any]], Any
]  # runs a traced step with the leaves of a call
_FEED = "replicator_feed"
MANY_BUILDS = 5  # builds of the same code at which a warning is logged, once


class State:
    """State that a step keeps between its calls.

    It outlives the Step, and refers to none of its functions and values: a step that is
    run again is looked up by its functions, and its state is freed with them.

    Attributes:
        prepared: Callables that run the step, by the key of a call's values.
        feed: The inputs of eager calls and of functions.
        plan: The communication plan of the step, as it was last built.
        writes: Whether that build wrote variables that have an owner.
        step: Returns the Step that `build` returned, if it is still alive.
        lock: Held while the step runs.
        outdated: Whether variables' components have moved since this was set to False.
        passes: How many epochs have begun.
        names: What step_fn reads by name, as it was when the step was built.
    """

    def __init__(self, lock: locks.StepLock, inputs: positions.Positions) -> None:
        self.lock = lock
        self._inputs = inputs
        self.outdated = False
        self.names: names_read.Names | None = None
        self.prepared: dict[Hashable, StepCall] = {}
        self.feed: feeds.Feed | None = None
        self.plan: plans.Plan | None = None
        self.writes = False
        self.passes = 0
        self.step: Callable[[], Any] = lambda: None  # a weak reference

    def is_current(self) -> bool:
        """Whether step_fn still reads what its traces were built of."""
        return self.names is None or self.names.is_unchanged()

    def trace_again(self) -> None:
        """Drops the traces; the next call traces the step again."""
        self.outdated = True
        self.prepared.clear()

    def keep(self, feed: feeds.Feed) -> None:
        """Keeps the inputs of eager calls and of functions."""
        self.feed = feed
        positions.add(self._inputs, feed, self)

    def feed_in(self, graph: tf.Graph) -> feeds.Feed | None:
        """Returns the inputs in a tf.Graph, which are stored in the graph, not here."""
        entries = graph.get_collection((_FEED, id(self)))
        return entries[0][1] if entries else None

    def keep_in(self, graph: tf.Graph, feed: feeds.Feed | None) -> None:
        """Stores this state and its inputs in a graph that the step is built into."""
        graph.get_collection_ref((_FEED, id(self)))[:] = [(self, feed)]

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Restarts the inputs, if there are any."""
        feed = self.feed if session is None else self.feed_in(session.graph)
        if feed is not None:
            feed.initialize(session)


class StepFunction:
    """What a Replicator stores for a step_fn, over all inputs that it is run with.

    Attributes:
        states: The states of its steps, by input_fn.
        builds: How many input_fns there were of each piece of code.
        datasets: How many Datasets it was run with.
        fresh: Whether no step has been created from it yet.
        renewals: How often each of the names that it reads had changed.
        fixed: Those that are no longer compared.
    """

    def __init__(self) -> None:
        self.states: cache.Table[State] = cache.Table()
        self.builds = cache.FunctionCounts()
        self.datasets = 0
        self.fresh = True
        self.renewals: collections.Counter[str] = collections.Counter()
        self.fixed: set[str] = set()


def renew(step_fn: Any, function: StepFunction, state: State) -> None:
    """Drops the traces of a step if what step_fn reads by name has changed.

    Warns of the first change. A number or text that goes on changing is probably
    counted or chosen at each call: after some builds, the step keeps its last value.

    Args:
        step_fn: The user's function.
        function: What is kept for it.
        state: The state of the step.
    """
    assert state.names is not None
    changes = state.names.changes()
    is_first = not function.renewals
    for change in changes:
        function.renewals[change.name] += 1
        if change.plain and function.renewals[change.name] > MANY_BUILDS:
            function.fixed.add(change.name)
            _warn(
                step_fn,
                change,
                f"as at {MANY_BUILDS} calls before: the step goes on with the value "
                "that it was built with last",
            )
    if all(change.name in function.fixed for change in changes):
        state.names = names_read.Names(step_fn, function.fixed)
        return
    if is_first:
        _warn(step_fn, changes[0], "the step is built again, which takes long")
    state.names = None
    state.trace_again()


def _warn(step_fn: Any, change: names_read.Change, outcome: str) -> None:
    fix = "To use several in turn, pass each by a functools.partial of step_fn."
    if change.plain:
        fix = "What changes often belongs in args=(...), which are fed at each call."
    logging.warning(
        "The step_fn at %s reads `%s`, which %s; %s. %s",
        errors.definition(step_fn) or errors.user_line(),
        change.name,
        change.description,
        outcome,
        fix,
    )
