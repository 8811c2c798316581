# SPDX-License-Identifier: Apache-2.0
"""Step: what `Replicator.build` returns and `run` calls.

It decides between the three ways of running: eager, inside a tf.function, or in a
tf.Graph with sessions. The traced function and the inputs live longer than a call, in
its State (state.py), which registry.py looks up by the user's functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from absl import logging

from replicator import context, devices, errors, values
from replicator._tf import autograph, choice
from replicator.cluster import peers
from replicator.costs import cost, rehearsal
from replicator.graph.order import ordering
from replicator.graph.passes import once
from replicator.inputs import checks, feed_factory, feeds, shared_pipelines
from replicator.interop import distribute
from replicator.primitives import table
from replicator.report import plan as plans
from replicator.step import (
    building,
    eager_calls,
    known,
    loops,
    names_read,
    outputs,
    repair,
    stages,
    step_arguments,
)
from replicator.step.requests import CallArguments, Request
from replicator.step.state import (
    MANY_BUILDS,
    State,
    StepCall,
    StepFunction,
    renew,
)
from replicator.variables import python_calls, storage


class _BuildInputs(NamedTuple):
    """The inputs and values with which one call builds the step.

    Attributes:
        feed: The inputs.
        call_args: The values passed to the call.
        leaves: Their tensors in the graph being built.
        use: Called with each variable whose components the step uses as they are.
    """

    feed: feeds.Feed | None
    call_args: CallArguments
    leaves: Sequence[Any]
    use: Callable[[storage.Storage], None]


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
        settings: known.Settings,
        request: Request,
        keep_plan: Callable[[plans.Plan], None],
        function: StepFunction,
        state: State,
    ) -> None:
        self._settings = settings
        self._request = request
        self._keep_plan = keep_plan
        self._function = function
        self._state = state
        self._count = settings.world.num_local

    @autograph.not_converted
    def __call__(self, *args: Any) -> Any:
        """Runs or builds one step.

        Example:
            >>> step = repl.build(lambda x, scale: scale * x, lambda: tf.constant(3.0))
            >>> float(step(1.0)[0]), float(step(2.0)[0])
            (3.0, 6.0)

        Args:
            *args: Further arguments of step_fn, after its element, in place of the
                `args` of `build`.

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
                "a step was run inside a step.",
                fix="run it outside; inside a step, call the function itself.",
            )
        python_calls.refuse_step()
        call_args = self._request.arguments_of(args or self._request.args, self._count)
        if not runs_here():
            return self._build(tf.compat.v1.get_default_graph(), call_args)
        with self._settings.lock:
            if not self._state.is_current():
                renew(self._request.step_fn, self._function, self._state)
            run = self._state.prepared.get(call_args.key) or self._eager_call(call_args)
            stages.ran(self._settings.stages, self._request.step_fn)
            return run(call_args.leaves)

    @autograph.not_converted
    def initialize(self, session: tf.compat.v1.Session | None = None) -> None:
        """Restarts the inputs from their first element.

        Example:
            >>> step = repl.build(lambda x: x, lambda: tf.data.Dataset.range(4))
            >>> _ = step()
            >>> step.initialize()
            >>> [int(x) for x in step()]
            [0, 1]

        Args:
            session: The session that runs a step built into its graph; None when eager.

        Raises:
            ArgumentError: `session` is not a session.
        """
        step_arguments.check_session(session)
        self._state.initialize(session)

    @property
    def plan(self) -> plans.Plan:
        """The communication plan of this step, as it was last built.

        When eager, a step that has not been built yet is built, but not run.

        Example:
            >>> step = repl.build(lambda: repl.all_reduce(1.0))
            >>> [row.primitive for row in step.plan]
            ['all_reduce']

        Raises:
            ContextError: In a graph or inside a step, before the step is built.
        """
        if self._state.plan is None and runs_here():
            self._eager_call(
                self._request.arguments_of(self._request.args, self._count)
            )
        plan = self._state.plan
        if plan is None:
            raise errors.ContextError(
                "the plan of a step was asked for before the step was built.",
                fix="call the step first, which builds it into the current graph.",
            )
        return plan

    def _eager_call(self, call_args: CallArguments) -> StepCall:
        """Returns the callable that runs the step, traced on the first call."""
        prepared = self._state.prepared
        with self._settings.lock:  # a thread that waited here finds it traced
            if call_args.key not in prepared:
                distribute.refuse_strategy("run")
                step_arguments.check_takes(self._request, call_args.num_args)
                prepared[call_args.key] = self._trace_until_settled(call_args)
                self._state.names = names_read.Names(
                    self._request.step_fn, self._function.fixed
                )
                if len(prepared) == MANY_BUILDS:
                    logging.warning(
                        "The step at %s has been passed values of %d structures, "
                        "dtypes or shapes. For each of them it is built again, which "
                        "takes long: pad them to a few shapes.",
                        errors.definition(self._request.step_fn) or errors.user_line(),
                        MANY_BUILDS,
                    )
            return prepared[call_args.key]

    def _trace_until_settled(self, call_args: CallArguments) -> StepCall:
        """Traces the step, again if a variable's components move meanwhile."""
        while True:
            self._state.outdated = False
            traced = self._trace(call_args)
            if not self._state.outdated:
                return traced

    def _trace(self, call_args: CallArguments) -> StepCall:
        """Traces the step; returns the callable that runs it and packs its results."""
        structures: list[Any] = []
        current: list[Any] = []  # the leaves of a call, while it runs
        shared_pipelines.check_values(
            checks.name_of(self._request.step_fn),
            call_args.of_all_replicas(),
            self._settings.peers,
        )
        feed = self._feed()  # outside the trace: its variables outlive the function

        def traced() -> list[list[Any]]:
            inputs = _BuildInputs(
                feed, call_args, call_args.placeholders(current), self._use
            )
            returned = self._build_into(inputs)
            structures.append(tf.nest.map_structure(type, returned[0]))
            return [
                outputs.returnable(tf.nest.flatten(replica_value))
                for replica_value in returned
            ]

        with eager_calls.holding(current, call_args.leaves):
            function = choice.trace(traced, ordering.order_as_created)
            writes = self._state.writes
            on_cpus = cost.share_memory(self._settings.world.devices)
            owners = self._settings.factory.owners()
            variables = repair.mirrored(function.captured_inputs, owners)
            run = choice.prepare_call(function, on_cpus)
            if self._settings.peers is not None:
                text = f"runs {errors.definition(self._request.step_fn)}"
                run = self._settings.peers.monitor.tracked(run, function, text)
        run = repair.equal_after_errors(
            eager_calls.warning_of_rest(run, feed, self._request.steps_per_call),
            variables,
            self._settings.peers,
        )
        run = devices.ordered(run, self._settings.world.devices)
        if self._settings.clock is not None and writes:
            run = self._settings.clock.counted(run, self._request.steps_per_call)
        packed = eager_calls.packed(run, function, structures[-1])
        if not call_args.leaves:
            return lambda _: packed()

        def call(leaves: Sequence[Any]) -> Any:
            with eager_calls.holding(current, leaves):
                return packed()

        return call

    def _build(self, graph: tf.Graph, call_args: CallArguments) -> Any:
        """Builds the step into `graph`, the default graph; returns symbolic values."""
        distribute.refuse_strategy("run")
        if self._settings.peers is not None:
            step_arguments.refuse_session(self._request.step_fn)
        if self._settings.clock is not None:
            self._settings.clock.refuse_graph()
        step_arguments.check_takes(self._request, call_args.num_args)
        with self._settings.lock:  # threads share one feed per graph, too
            feed = self._feed()
            if feed is not None and graph.building_function:
                feed.warn_of_rest(None)
            inputs = _BuildInputs(
                feed, call_args, call_args.leaves, storage.Storage.settle
            )
            returned = self._build_into(inputs)
        if graph.building_function:
            self._state.keep_in(graph, None)
        return values.transpose(returned)

    def _build_into(self, inputs: _BuildInputs) -> list[Any]:
        """Builds the steps of one call into the default graph; returns all results."""
        steps = self._request.steps_per_call
        if steps == 1:
            return self._build_step(inputs)
        return loops.repeat(
            lambda: self._build_step(inputs), steps, self._settings.world.devices
        )

    def _use(self, variable: storage.Storage) -> None:
        """Has this step traced again if a variable's components move."""
        variable.add_user(self._state)

    def _build_step(self, inputs: _BuildInputs) -> list[Any]:
        """Builds one step into the default graph and records its plan.

        Returns what step_fn returned, like `_build_into`.
        """
        devices = self._settings.world.devices
        with self._settings.lock:
            built_step = building.build_step(
                self._settings,
                self._request.step_fn,
                inputs.feed
                or inputs.call_args.feed(inputs.leaves, self._settings.world),
                self._function,
                lambda: inputs.call_args.args(inputs.leaves, devices),
                inputs.call_args.of_one_replica(inputs.leaves),
            )
        for variable in built_step.variables:
            inputs.use(variable.storage)
        graph = tf.compat.v1.get_default_graph()
        leaves = tf.nest.flatten(built_step.returned, expand_composites=True)
        rehearsal.record_ops_for_all(
            lambda: once.names(
                graph.get_operations(), leaves, built_step.variables, graph
            )
        )
        plan = plans.make_plan(
            built_step.communications,
            self._settings.world.all_devices,
            table.DEFAULT_ALGORITHMS,
            storage.notes(built_step.variables),
            built_step.pulled,
        )
        self._state.plan = plan
        self._state.writes = built_step.writes
        self._keep_plan(plan)
        return built_step.returned

    def _feed(self) -> feeds.Feed | None:
        """Returns the inputs, which live outside the function being traced."""
        if self._request.source is None:
            return None
        with tf.init_scope():
            eager = tf.executing_eagerly()
            graph = tf.compat.v1.get_default_graph()
        existing_feed = self._state.feed if eager else self._state.feed_in(graph)
        if existing_feed is not None:
            return existing_feed
        clock = self._settings.clock
        place = (0, 1) if clock is None else clock.place
        with peers.telling(self._settings.peers), tf.init_scope():
            feed = feed_factory.make_feed(
                self._request.source,
                self._settings.world,
                self._request.input_mode,
                self._request.remainder,
                self._settings.peers,
                feed_factory.AsynchronousProgram(*place),
            )
        if not feed.goes_on:
            return feed  # not kept: the next build makes another
        if eager:
            self._state.keep(feed)
        else:
            self._state.keep_in(graph, feed)
        return feed


def runs_here() -> bool:
    """Whether a step called now runs eagerly, rather than being built into a graph."""
    return context.current() is None and tf.executing_eagerly()
