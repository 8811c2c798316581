"""Step: what `Replicator.build` returns and `run` calls.

It decides between the three ways of running (eager, inside a tf.function, in a tf.Graph
with sessions). What lives between its calls, the traced function and the inputs, is its
State; `Steps` finds that again by the functions.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import _tf, context, errors, values
from replicator.costs import cost
from replicator.graph.order import ordering
from replicator.inputs import feeds
from replicator.plan import plan as plans
from replicator.primitives import table
from replicator.step import (
    building,
    cache,
    draft,
    loops,
    outputs,
    repair,
    step_arguments,
)
from replicator.variables import locks, python_calls, storage

_FEED = "replicator_feed"
_MANY_BUILDS = 5  # of one piece of code; a program that means it is warned once
_do_not_convert = tf.autograph.experimental.do_not_convert


class State:
    """What lives between the calls of a step.

    It outlives the Step, and holds none of the functions: a step that is run again is
    looked up by them, and goes when they go.
    """

    def __init__(self, lock: locks.StepLock) -> None:
        self.lock = lock
        self.prepared: Callable[[], Any] | None = None
        self.traces_again = False
        self.feed: feeds.Feed | None = None
        self.plan: plans.Plan | None = None
        self.step: Callable[[], Step | None] = lambda: None  # a weak reference

    def trace_again(self) -> None:
        """Forgets what was traced; the next call traces the step again."""
        self.prepared, self.traces_again = None, True

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
        fresh: Whether no step was made of it yet.
    """

    def __init__(self) -> None:
        self.states: cache.Table[State] = cache.Table()
        self.builds = cache.Counts()
        self.fresh = True


class Step:
    """A step_fn with its inputs, ready to be run on all replicas.

    Call it to run one step (eagerly) or to build one (inside a tf.function or a
    tf.Graph). Each call takes the next elements of the inputs.

    Example:
        >>> step = repl.build(lambda x: x, lambda: tf.data.Dataset.range(4))
        >>> [int(x) for x in step()], [int(x) for x in step()]
        ([0, 1], [2, 3])
    """

    def __init__(
        self,
        settings: draft.Settings,
        step_fn: Callable[..., Any],
        input_fn: Callable[..., Any] | None,
        input_mode: str,
        steps_per_call: int,
        keep_plan: Callable[[plans.Plan], None],
        function: StepFunction,
        state: State,
    ) -> None:
        self._settings = settings
        self._step_fn = step_fn
        self._input_fn = input_fn
        self._input_mode = input_mode
        self._steps_per_call = steps_per_call
        self._keep_plan = keep_plan
        self._function = function
        self._state = state

    @_do_not_convert
    def __call__(self) -> Any:
        """Runs or builds one step.

        Returns:
            The structure that step_fn returned, with a PerReplica of one value per
            replica at each leaf.

        Raises:
            tf.errors.OutOfRangeError: The inputs are exhausted; nothing was changed.
            MismatchError: The replicas communicate or return differently.
            ContextError: Called inside a step.
        """
        if context.current() is not None:
            raise errors.ContextError(
                errors.compose(
                    "a step was run inside a step.",
                    [f"at {errors.user_line()}"],
                    "run it outside; inside a step, call the function itself.",
                )
            )
        python_calls.refuse_step()
        if not _runs_here():
            return self._build(tf.compat.v1.get_default_graph())
        with self._settings.lock:
            run = self._state.prepared or self._eager_call()
            return run()

    @_do_not_convert
    def initialize(self, session: tf.compat.v1.Session | None = None) -> None:
        """Starts the inputs over from their first element.

        Example:
            >>> step = repl.build(lambda x: x, lambda: tf.data.Dataset.range(4))
            >>> _ = step()
            >>> step.initialize()
            >>> [int(x) for x in step()]
            [0, 1]

        Args:
            session: The session in which a step of its graph runs; None when eager.

        Raises:
            ArgumentError: It is no session.
        """
        step_arguments.check_session(session)
        self._state.initialize(session)

    @property
    def plan(self) -> plans.Plan:
        """What the replicas communicate in this step, as it was last built.

        Eagerly, a step that was not built yet is built, and not run.

        Example:
            >>> step = repl.build(lambda: repl.all_reduce(1.0))
            >>> [row.primitive for row in step.plan]
            ['all_reduce']

        Raises:
            ContextError: In a graph or inside a step, before the step is built.
        """
        if self._state.plan is None and _runs_here():
            self._eager_call()
        plan = self._state.plan
        if plan is None:
            raise errors.ContextError(
                errors.compose(
                    "the plan of a step was asked for before the step was built.",
                    [f"at {errors.user_line()}"],
                    "call the step first, which builds it into the graph at hand.",
                )
            )
        return plan

    def _eager_call(self) -> Callable[[], Any]:
        """Returns what runs the step, which is traced at the first call."""
        with self._settings.lock:  # a thread that waits here finds it traced
            while self._state.prepared is None:
                self._state.traces_again = False
                traced = self._trace()
                if not self._state.traces_again:  # while it was traced, that is
                    self._state.prepared = traced
            return self._state.prepared

    def _trace(self) -> Callable[[], Any]:
        """Traces the step once; returns what runs it and packs what it returns."""
        structures: list[Any] = []
        feed = self._feed()  # outside: variables that it makes are not the function's

        def traced() -> list[list[Any]]:
            graph = tf.compat.v1.get_default_graph()
            returned = self._build_into(graph, feed, lambda s: s.add_user(self._state))
            structures.append(tf.nest.map_structure(_kind, returned[0]))
            return [outputs.returnable(tf.nest.flatten(own)) for own in returned]

        function = _tf.trace(traced, ordering.order_as_created)
        on_cpus = cost.share_memory(self._settings.devices)
        owners = self._settings.factory.owners()
        variables = repair.mirrored(function.captured_inputs, owners)
        run = _tf.prepare_call(function, on_cpus)
        return _packed_call(
            repair.equal_after_errors(run, variables), function, structures[-1]
        )

    def _build(self, graph: tf.Graph) -> Any:
        """Builds the step into the graph at hand; returns symbolic values."""
        with self._settings.lock:  # threads have one feed in a graph, too
            feed = self._feed()
            returned = self._build_into(graph, feed, storage.Storage.settle)
        if graph.building_function:
            self._state.keep_in(graph, None)
        return values.transpose(returned)

    def _build_into(
        self,
        graph: tf.Graph,
        feed: feeds.Feed | None,
        use: Callable[[storage.Storage], None],
    ) -> list[Any]:
        """Builds what one call does into a graph; returns what step_fn returned.

        Args:
            graph: The graph.
            feed: The inputs.
            use: Tells each variable that the step uses its components as they are.
        """
        if self._steps_per_call == 1:
            return self._build_step(graph, feed, use)
        return loops.repeat(
            lambda: self._build_step(tf.compat.v1.get_default_graph(), feed, use),
            self._steps_per_call,
            self._settings.devices,
        )

    def _build_step(
        self,
        graph: tf.Graph,
        feed: feeds.Feed | None,
        use: Callable[[storage.Storage], None],
    ) -> list[Any]:
        """Builds one step into a graph, notes its plan, returns what step_fn did."""
        with self._settings.lock:
            built = building.build_step(
                self._settings, self._step_fn, feed, graph, self._function
            )
        plan = plans.make_plan(
            built.communications,
            self._settings.devices,
            table.DEFAULT_ALGORITHMS,
            storage.notes(built.variables),
        )
        for variable in built.variables:
            use(variable.storage)
        self._state.plan = plan
        self._keep_plan(plan)
        return built.returned

    def _feed(self) -> feeds.Feed | None:
        """Returns the inputs, which live outside of the function being traced."""
        if self._input_fn is None:
            return None
        with tf.init_scope():
            eager = tf.executing_eagerly()
            graph = tf.compat.v1.get_default_graph()
        known = self._state.feed if eager else self._state.feed_in(graph)
        if known is not None:
            return known
        with tf.init_scope():
            feed = feeds.make_feed(
                self._input_fn, self._settings.devices, self._input_mode
            )
        if not isinstance(feed, feeds.DatasetFeed):
            return feed  # which has nothing that goes on; the next build makes another
        if eager:
            self._state.feed = feed
        else:
            self._state.keep_in(graph, feed)
        return feed


class Steps:
    """The steps of a Replicator, by their functions, as long as these are there."""

    def __init__(
        self, settings: draft.Settings, keep_plan: Callable[[plans.Plan], None]
    ) -> None:
        self._settings = settings
        self._keep_plan = keep_plan
        self._functions: cache.Table[StepFunction] = cache.Table()
        self._states: weakref.WeakSet[State] = weakref.WeakSet()
        self._builds = cache.Counts()  # of step_fns
        self._lock = threading.RLock()  # of what is above, held for moments

    def run(
        self, step_fn: Any, input_fn: Any, input_mode: str, steps_per_call: int
    ) -> Any:
        """Calls a step; quickly, if it is ready to run."""
        _, state = self._find(step_fn, input_fn, input_mode, steps_per_call)
        if state.prepared is not None and _runs_here():
            with self._settings.lock:
                prepared = state.prepared  # another thread may have had it forgotten
                if prepared is not None:
                    return prepared()
        return self.get(step_fn, input_fn, input_mode, steps_per_call)()

    def get(
        self, step_fn: Any, input_fn: Any, input_mode: str, steps_per_call: int
    ) -> Step:
        """Returns a step: the one that is there, else a new one."""
        found = self._find(step_fn, input_fn, input_mode, steps_per_call)
        function, state = found
        with self._lock:
            step = state.step()
            if step is None:
                if state not in self._states:
                    step_arguments.check_takes(step_fn, input_fn)
                    self._states.add(state)
                    self._warn_of_new_functions(function, step_fn, input_fn)
                asked = (step_fn, input_fn, input_mode, steps_per_call)
                step = Step(self._settings, *asked, self._keep_plan, *found)
                state.step = weakref.ref(step)
            return step

    def initialize(self, session: tf.compat.v1.Session | None) -> None:
        """Starts the inputs of all steps over."""
        step_arguments.check_session(session)
        with self._lock:
            states = list(self._states)
        for state in states:
            state.initialize(session)

    def _find(
        self, step_fn: Any, input_fn: Any, input_mode: str, steps_per_call: int
    ) -> tuple[StepFunction, State]:
        """Returns what there is of a step."""
        step_arguments.check(step_fn, input_fn, input_mode, steps_per_call)
        function = self._functions.get(step_fn, StepFunction)
        state = function.states.get(
            input_fn, lambda: State(self._settings.lock), input_mode, steps_per_call
        )
        return function, state

    def _warn_of_new_functions(
        self, function: StepFunction, step_fn: Any, input_fn: Any
    ) -> None:
        """Warns of functions that are made anew for each call, once for a line."""
        name, changed, counts = "input_fn", input_fn, function.builds
        if function.fresh:
            function.fresh = False
            name, changed, counts = "step_fn", step_fn, self._builds
        if counts.count(changed) == _MANY_BUILDS:
            logging.warning(
                "The %s at %s has been a new function %d times. Each time the step is "
                "built anew, which takes long, and its inputs start over. Make the "
                "function once, outside of the loop.",
                name,
                cache.line_of(changed),
                _MANY_BUILDS,
            )


def _runs_here() -> bool:
    """Whether a step that is called now runs, and is not built into a graph."""
    return context.current() is None and tf.executing_eagerly()


def _packed_call(
    run: Callable[[], Any], function: Any, kinds: Any
) -> Callable[[], Any]:
    """Returns what runs a traced step and returns a structure of PerReplica.

    Args:
        run: Runs the function.
        function: Returns a list of the leaves of each replica.
        kinds: What one replica returned, with the type of each leaf in its place.
    """
    leaves = tf.nest.flatten(kinds)
    count, pack = len(leaves), values.packer(kinds)
    plain = all(issubclass(leaf, tf.Tensor) for leaf in leaves)

    def call() -> Any:
        flat = run()  # no gradient passes, as in outputs.seal
        if plain:
            return pack([values.PerReplica(flat[i::count]) for i in range(count)])
        rows = _tf.pack_results(function, flat)
        return pack([values.PerReplica(column) for column in zip(*rows, strict=True)])

    return call


def _kind(leaf: Any) -> type:
    """Stands for a leaf in a structure that outlives the graph."""
    return type(leaf)
