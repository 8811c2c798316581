# SPDX-License-Identifier: Apache-2.0
"""What lives between the calls of a step: the traced function and the inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator.inputs import feeds, positions
from replicator.plan import plan as plans
from replicator.step import cache
from replicator.variables import locks

Call = Callable[[Sequence[Any]], Any]  # runs a traced step with the leaves of a call
_FEED = "replicator_feed"


class State:
    """What lives between the calls of a step.

    It outlives the Step, and holds none of the functions and values: a step that is run
    again is looked up by its functions, and goes when they go.

    Attributes:
        prepared: What runs the step, by the key of the values that a call hands over.
        feed: The inputs of eager calls and of functions.
        plan: What the step communicates, as it was built last.
        writes: Whether it then wrote variables that have an owner.
        step: Returns the Step that `build` has returned, if it is still there.
        lock: What is held while the step runs.
        outdated: Whether variables' components have moved since this was set to False.
    """

    def __init__(self, lock: locks.StepLock, inputs: positions.Positions) -> None:
        self.lock = lock
        self._inputs = inputs
        self.outdated = False
        self.prepared: dict[Hashable, Call] = {}
        self.feed: feeds.Feed | None = None
        self.plan: plans.Plan | None = None
        self.writes = False
        self.step: Callable[[], Any] = lambda: None  # a weak reference

    def trace_again(self) -> None:
        """Forgets what was traced; the next call traces the step again."""
        self.outdated = True
        self.prepared.clear()

    def keep(self, feed: feeds.Feed) -> None:
        """Keeps the inputs of eager calls and of functions."""
        self.feed = feed
        self._inputs.add(feed, self)

    def feed_in(self, graph: tf.Graph) -> feeds.Feed | None:
        """Returns the inputs in a tf.Graph, which are kept with it and not here."""
        kept = graph.get_collection((_FEED, id(self)))
        return kept[0][1] if kept else None

    def keep_in(self, graph: tf.Graph, feed: feeds.Feed | None) -> None:
        """Lets a graph that this step is built into keep it, and its inputs there."""
        graph.get_collection_ref((_FEED, id(self)))[:] = [(self, feed)]

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Starts the inputs over, if there are any."""
        feed = self.feed if session is None else self.feed_in(session.graph)
        if feed is not None:
            feed.initialize(session)


class StepFunction:
    """What a Replicator keeps for a step_fn, whichever inputs it is run with.

    Attributes:
        states: By input_fn.
        builds: How many input_fns there were of each piece of code.
        datasets: How many Datasets there were.
        fresh: Whether no step was made of it yet.
    """

    def __init__(self) -> None:
        self.states: cache.Table[State] = cache.Table()
        self.builds = cache.Counts()
        self.datasets = 0
        self.fresh = True
