"""Step: what `Replicator.build` returns and `run` calls.

It decides between the three ways of running (eager, inside a tf.function, in a tf.Graph
with sessions) and holds what lives between calls: the traced function and the inputs.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator import _tf, building, context, errors, inputs, loops, outputs, values
from replicator.graph import cost, ordering
from replicator.plan import rows
from replicator.primitives import table

_FEED = "replicator_feed"
_do_not_convert = tf.autograph.experimental.do_not_convert


class Step:
    """A step_fn with its inputs, ready to be run on all replicas.

    Call it to run one step (eagerly) or to build one (inside a tf.function or a
    tf.Graph). The inputs go on from call to call.
    """

    def __init__(
        self,
        settings: building.Settings,
        step_fn: Callable[..., Any],
        input_fn: Callable[..., Any] | None,
        input_mode: str,
        steps_per_call: int = 1,
        keep_plan: Callable[[rows.Plan], None] = lambda plan: None,
    ) -> None:
        self._settings = settings
        self._step_fn = step_fn
        self._input_fn = input_fn
        self._input_mode = input_mode
        self._steps_per_call = steps_per_call
        self._keep_plan = keep_plan
        self._plan: rows.Plan | None = None
        self._prepared: Callable[[], Any] | None = None
        self._eager_feed: inputs.Feed | None = None

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
        if not tf.executing_eagerly():
            return self._build(tf.compat.v1.get_default_graph())
        return self._eager_call()()

    @_do_not_convert
    def initialize(self, session: tf.compat.v1.Session | None = None) -> None:
        """Starts the inputs over from their first element.

        Args:
            session: The session in which a step of its graph runs; None when eager.
        """
        feed = self._eager_feed if session is None else self._feed_of(session.graph)
        if feed is not None:
            feed.initialize(session)

    @property
    def plan(self) -> rows.Plan:
        """What the replicas communicate in this step, as it was last built.

        Eagerly, a step that was not built yet is built, and not run.

        Raises:
            ContextError: In a graph or inside a step, before the step is built.
        """
        if self._plan is None and context.current() is None and tf.executing_eagerly():
            self._eager_call()
        if self._plan is None:
            raise errors.ContextError(
                errors.compose(
                    "the plan of a step was asked for before the step was built.",
                    [f"at {errors.user_line()}"],
                    "call the step first, which builds it into the graph at hand.",
                )
            )
        return self._plan

    def _eager_call(self) -> Callable[[], Any]:
        """Returns what runs the step, which is traced at the first call."""
        if self._prepared is None:
            with self._settings.lock:  # a thread that waits here finds it traced
                if self._prepared is None:
                    self._prepared = self._trace()
        return self._prepared

    def _trace(self) -> Callable[[], Any]:
        """Traces the step once; returns what runs it and packs what it returns."""
        structures: list[Any] = []
        feed = self._feed()  # outside: variables that it makes are not the function's

        def traced() -> list[list[Any]]:
            graph = tf.compat.v1.get_default_graph()
            returned = self._build_into(graph, feed)
            structures.append(tf.nest.map_structure(_kind, returned[0]))
            return [outputs.returnable(tf.nest.flatten(own)) for own in returned]

        function = _tf.trace(traced, ordering.order_as_created)
        on_cpus = cost.share_memory(self._settings.devices)
        return _packed_call(function, structures[-1], on_cpus)

    def _build(self, graph: tf.Graph) -> Any:
        """Builds the step into the graph at hand; returns symbolic values."""
        return values.transpose(self._build_into(graph, self._feed()))

    def _build_into(self, graph: tf.Graph, feed: inputs.Feed | None) -> list[Any]:
        """Builds what one call does into a graph; returns what step_fn returned."""
        if self._steps_per_call == 1:
            return self._build_step(graph, feed)
        return loops.repeat(
            lambda: self._build_step(tf.compat.v1.get_default_graph(), feed),
            self._steps_per_call,
            self._settings.devices,
        )

    def _build_step(self, graph: tf.Graph, feed: inputs.Feed | None) -> list[Any]:
        """Builds one step into a graph, notes its plan, returns what step_fn did."""
        with self._settings.lock:
            built = building.build_step(self._settings, self._step_fn, feed, graph)
        self._plan = rows.make_plan(
            built.communications, self._settings.devices, table.ALGORITHMS
        )
        self._keep_plan(self._plan)
        return built.returned

    def _feed(self) -> inputs.Feed | None:
        """Returns the inputs, which live outside of the function being traced."""
        if self._input_fn is None:
            return None
        with tf.init_scope():
            eager = tf.executing_eagerly()
            graph = tf.compat.v1.get_default_graph()
        known = self._eager_feed if eager else self._feed_of(graph)
        if isinstance(known, inputs.DatasetFeed):
            return known
        with tf.init_scope():
            feed = inputs.make_feed(
                self._input_fn, self._settings.devices, self._input_mode
            )
        if eager:
            self._eager_feed = feed
        else:
            graph.get_collection_ref((_FEED, id(self)))[:] = [(self, feed)]
        return feed

    def _feed_of(self, graph: tf.Graph) -> inputs.Feed | None:
        """Returns the inputs in a tf.Graph, which are kept with it and not here."""
        kept = graph.get_collection((_FEED, id(self)))
        return kept[0][1] if kept else None


def comparable(function: Any, by_content: bool = False) -> Any:
    """Returns what is equal for functions that do the same, as far as one can tell.

    Bound methods are new objects at each look, but equal; partials are compared by what
    they are made of. Where an id tells functions apart, a Step that keeps the function
    keeps the id from being used again.

    Args:
        function: Any callable.
        by_content: Whether functions of the same code that hold the same objects count
            as equal, such as a lambda in a loop.
    """
    if isinstance(function, functools.partial):
        keywords = tuple(sorted(function.keywords.items()))
        inside = comparable(function.func, by_content)
        key: Any = (inside, function.args, keywords)
    elif by_content and isinstance(function, types.FunctionType):
        held = [function.__globals__, *(function.__defaults__ or ())]
        held += (function.__kwdefaults__ or {}).values()
        cells = tuple(map(_held_by, function.__closure__ or ()))
        key = (function.__code__, tuple(map(id, held)), cells)
    else:
        key = function
    try:
        hash(key)
    except TypeError:
        return id(function)
    return key


def _held_by(cell: types.CellType) -> int | None:
    try:
        return id(cell.cell_contents)
    except ValueError:
        return None  # a variable without a value yet


def _packed_call(function: Any, kinds: Any, on_cpus: bool) -> Callable[[], Any]:
    """Returns what runs a traced step and returns a structure of PerReplica.

    Args:
        function: Returns a list of the leaves of each replica.
        kinds: What one replica returned, with the type of each leaf in its place.
        on_cpus: Whether all replicas run on CPUs of this process.
    """
    leaves = tf.nest.flatten(kinds)
    run, count, pack = (
        _tf.prepare_call(function, on_cpus),
        len(leaves),
        values.packer(kinds),
    )
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
