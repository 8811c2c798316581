"""Builds a step: once per device, then matched, lowered and rewired.

The order of things, for one build:

1. pull the inputs of all replicas;
2. call step_fn once per device, in replica order, under that device;
3. check that the replicas returned alike, then match, lower and rewire (graph/);
4. check and order the side effects;
5. give back one structure of PerReplica values.

`Step` is what `Replicator.build` returns and `run` calls: it decides between the three
ways of running (eager, inside a tf.function, in a tf.Graph with sessions).
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors, inputs, values
from replicator.graph import effects, placeholder, random, rewrite
from replicator.primitives import table
from replicator.variables import VariableFactory


_do_not_convert = tf.autograph.experimental.do_not_convert


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """What all steps of one Replicator share.

    Attributes:
        devices: `devices[r]` is where replica r runs.
        check: Whether integers taken as equal are checked to be so.
        factory: Makes the variables.
        ledger: Where writes that keep replicas equal are entered.
        placers: `placers[r]` is the device function of replica r.
    """

    devices: tuple[str, ...]
    check: bool
    factory: VariableFactory
    ledger: effects.Ledger
    placers: tuple[Callable[[tf.Operation], str], ...]


def placer(device: str) -> Callable[[tf.Operation], str]:
    """Returns a device function that fills in what the user's own tf.device left open.

    A function and not a string: a tf.function that is called inside the step is traced
    anew for each device function, and so gets each replica's own variables.
    """
    default = tf.DeviceSpec.from_string(device)

    def place(op: tf.Operation) -> str:
        if not op.device:
            return device
        return default.make_merged_spec(
            tf.DeviceSpec.from_string(op.device)
        ).to_string()

    return place


class Step:
    """A step_fn with its inputs, ready to be run on all replicas.

    Call it to run one step (eagerly) or to build one (inside a tf.function or a
    tf.Graph). The inputs go on from call to call.
    """

    def __init__(
        self,
        settings: Settings,
        step_fn: Callable[..., Any],
        input_fn: Callable[..., Any] | None,
        input_mode: str,
    ) -> None:
        self._settings = settings
        self._step_fn = step_fn
        self._input_fn = input_fn
        self._input_mode = input_mode
        self._traced: tuple[Any, Any] | None = None
        self._eager_feed: inputs.Feed | None = None
        self._feeds: weakref.WeakKeyDictionary[tf.Graph, inputs.Feed]
        self._feeds = weakref.WeakKeyDictionary()

    @_do_not_convert
    def __call__(self) -> Any:
        """Runs or builds one step.

        Returns:
            The structure that step_fn returned, with a PerReplica of one value per
            replica at each leaf.

        Raises:
            tf.errors.OutOfRangeError: The inputs are exhausted; no variable was changed.
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
        if self._traced is None:
            self._traced = self._trace()
        function, structure = self._traced
        columns = [
            values.PerReplica(column) for column in zip(*function(), strict=True)
        ]
        if structure is None:  # one leaf, the most common structure
            return columns[0]
        return values.pack(structure, columns)

    @_do_not_convert
    def initialize(self, session: tf.compat.v1.Session | None = None) -> None:
        """Starts the inputs over from their first element.

        Args:
            session: The session in which a step of its graph runs; None when eager.
        """
        feed = self._eager_feed if session is None else self._feeds.get(session.graph)
        if feed is not None:
            feed.initialize(session)

    def _trace(self) -> tuple[Any, Any]:
        """Traces the step once; returns (function, structure of its outputs)."""
        structures: list[Any] = []

        def traced() -> list[list[Any]]:
            built = self._build_replicas(tf.compat.v1.get_default_graph())
            structures.append(built[0])
            return [_returnable(tf.nest.flatten(own)) for own in built]

        function = tf.function(traced, autograph=False).get_concrete_function()
        structure = structures[-1]
        single = not tf.nest.is_nested(structure)
        return function, None if single else tf.nest.map_structure(_forget, structure)

    def _build(self, graph: tf.Graph) -> Any:
        """Builds the step into the graph at hand; returns symbolic PerReplica values."""
        return values.transpose(self._build_replicas(graph))

    def _build_replicas(self, graph: tf.Graph) -> list[Any]:
        feed = self._feed()
        return build_step(self._settings, self._step_fn, feed, graph)

    def _feed(self) -> inputs.Feed | None:
        """Returns the inputs, which live outside of the function being traced."""
        if self._input_fn is None:
            return None
        with tf.init_scope():
            eager = tf.executing_eagerly()
            graph = tf.compat.v1.get_default_graph()
        known = self._eager_feed if eager else self._feeds.get(graph)
        if isinstance(known, inputs.DatasetFeed):
            return known
        with tf.init_scope():
            feed = inputs.make_feed(
                self._input_fn, self._settings.devices, self._input_mode
            )
        if eager:
            self._eager_feed = feed
        else:
            self._feeds[graph] = feed
        return feed


def _forget(leaf: Any) -> None:
    """Stands for a leaf in a structure that outlives the graph."""
    return None


def build_step(
    settings: Settings,
    step_fn: Callable[..., Any],
    feed: inputs.Feed | None,
    graph: tf.Graph,
) -> list[Any]:
    """Builds a step into `graph`, with all of its communication in place.

    Args:
        settings: What all steps of the Replicator share.
        step_fn: The user's function; of one element if there is a feed, else of nothing.
        feed: Gives each replica its element.
        graph: The default graph.

    Returns:
        What step_fn returned for each replica, as tensors.
    """
    knowledge: dict[Any, Any] = {}
    attempts = 3 + 2 * len(settings.devices)  # each has learned from one replica more
    for _ in range(attempts):
        start = _tf.operation_count(graph)
        build = context.Build(
            settings.devices, settings.check, graph, settings.ledger, knowledge
        )
        try:
            with _creating_variables(settings.factory):
                return _attempt(settings, step_fn, feed, build)
        except context.BuildAgain:
            _abandon(graph, start)
        except BaseException:
            _abandon(graph, start)
            raise
    raise AssertionError(f"the build did not settle in {attempts} attempts")


def _abandon(graph: tf.Graph, start: int) -> None:
    """Leaves a failed build without effects on what is built into the graph later."""
    if graph.building_function:
        ops = graph.get_operations()[start:]
        _tf.abandon([op for op in ops if _tf.is_stateful(op)])


@contextlib.contextmanager
def _creating_variables(factory: VariableFactory) -> Iterator[None]:
    """In this block, new variables are replicated, whichever graph they are put in."""
    with contextlib.ExitStack() as stack:
        with (
            tf.init_scope()
        ):  # where Keras creates variables while a function is traced
            stack.enter_context(tf.variable_creator_scope(factory.creator))
        stack.enter_context(tf.variable_creator_scope(factory.creator))
        yield


@contextlib.contextmanager
def replicated_variables(factory: VariableFactory) -> Iterator[None]:
    """What `Replicator.context()` does: new variables get one component per replica."""
    if context.current() is not None:
        yield  # inside a step they do anyway
        return
    with _creating_variables(factory):
        yield


def _attempt(
    settings: Settings,
    step_fn: Callable[..., Any],
    feed: inputs.Feed | None,
    build: context.Build,
) -> list[Any]:
    graph = build.graph
    with tf.name_scope("inputs"):
        elements = None if feed is None else feed.pull()
    outputs, ranges = [], []
    for replica_id in range(build.num_replicas):
        start = _tf.operation_count(graph)
        arguments = [] if elements is None else [elements[replica_id]]
        outputs.append(_build_replica(settings, step_fn, arguments, build, replica_id))
        ranges.append((start, _tf.operation_count(graph)))
    _check_outputs(outputs, build)
    start = _tf.operation_count(graph)
    ops = graph.get_operations()
    replicas = [ops[begin:end] for begin, end in ranges]
    if build.num_replicas > 1:
        _check_writes(settings, replicas)
        _check_circles(replicas)
    random.separate_seeds(replicas, graph.seed)
    rewrite.lower_and_rewire(replicas, build.devices, table.LOWERINGS)
    lowered = graph.get_operations()[start:]
    ready = [] if elements is None else inputs.ready(elements)
    return _order_effects(settings, [*replicas, lowered], ready, outputs, graph)


def _build_replica(
    settings: Settings,
    step_fn: Callable[..., Any],
    arguments: Sequence[Any],
    build: context.Build,
    replica_id: int,
) -> Any:
    """Calls step_fn for one replica; returns its outputs as tensors."""
    graph = build.graph
    # Zero-padded, so that order by name is replica order; see all_reduce.
    width = len(str(build.num_replicas - 1))
    name = f"replica_{replica_id:0{width}d}"
    function = _tf.function_of(step_fn)
    with (
        graph.device(settings.placers[replica_id]),
        tf.name_scope(name) as scope,
        random.graph_seed(graph, replica_id),
        _shared_v1_variables(graph, replica_id),
    ):
        replica = context.ReplicaContext(
            build,
            replica_id,
            step_key=(step_fn, None if graph.building_function else graph),
            scope=scope,
            depth=_tf.stack_depth(),
        )
        with context.building(replica):
            if graph.building_function:
                returned = _tf.call_converted(function, arguments)
            else:
                returned = function(*arguments)
            return tf.nest.map_structure(_as_output, returned)


@contextlib.contextmanager
def _shared_v1_variables(graph: tf.Graph, replica_id: int) -> Iterator[None]:
    """Lets tf.compat.v1.get_variable find what replica 0 made.

    What it does not find by name (slots, say, whose names are made unique) the variable
    factory finds by place.
    """
    if graph.building_function or replica_id == 0:
        yield
        return
    v1 = tf.compat.v1
    scope = v1.get_variable_scope()
    with v1.variable_scope(scope, reuse=v1.AUTO_REUSE, auxiliary_name_scope=False):
        yield


def _as_output(leaf: Any) -> Any:
    """Makes a leaf of what step_fn returned a tensor; None and ops stay."""
    if leaf is None or isinstance(leaf, tf.Operation):
        return leaf
    if tf.is_tensor(leaf) and not isinstance(leaf, tf.Tensor | tf.Variable):
        if isinstance(leaf, tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor):
            return leaf
    try:
        return tf.convert_to_tensor(leaf)
    except (TypeError, ValueError) as error:
        raise errors.ReplicatorError(
            errors.compose(
                f"step_fn returned {type(leaf).__name__} {leaf!r}, which is no tensor.",
                fix="return tensors, numbers, variables, operations, None, or a nest of "
                "them.",
            )
        ) from error


def _returnable(leaves: Sequence[Any]) -> list[Any]:
    """A traced function runs all of its ops, and cannot return them."""
    return [None if isinstance(leaf, tf.Operation) else leaf for leaf in leaves]


def _check_outputs(outputs: Sequence[Any], build: context.Build) -> None:
    """Raises MismatchError unless all replicas returned one structure."""
    first = outputs[0]
    for replica_id, other in enumerate(outputs[1:], 1):
        try:
            tf.nest.assert_same_structure(first, other, expand_composites=True)
            alike = all(
                (one is None) == (two is None)
                for one, two in zip(
                    tf.nest.flatten(first), tf.nest.flatten(other), strict=True
                )
            )
        except (TypeError, ValueError):
            alike = False
        if not alike:
            raise errors.MismatchError(
                errors.compose(
                    "step_fn returns different structures on different replicas.",
                    [
                        f"replica 0 ({build.devices[0]}): {_outline(first)}",
                        f"replica {replica_id} ({build.devices[replica_id]}): "
                        f"{_outline(other)}",
                    ],
                    "return the same structure on every replica; to return nothing on "
                    "one, return None on all.",
                )
            )


def _outline(structure: Any) -> str:
    """Describes a structure by the dtypes and shapes of its leaves."""

    def leaf(value: Any) -> str:
        if value is None or isinstance(value, tf.Operation):
            return type(value).__name__
        return str(placeholder.Value.of(value))

    return str(tf.nest.map_structure(leaf, structure)).replace("'", "")


def _check_writes(
    settings: Settings, replicas: Sequence[Sequence[tf.Operation]]
) -> None:
    """Raises ContextError if a step could make the replicas' variables drift apart."""
    owners = settings.factory.owners()
    outermost = _Captures().outermost
    for replica_id, ops in enumerate(replicas):
        for op, resource, agreed in effects.find_writes(ops, settings.ledger):
            if op in settings.factory.initializers:
                continue
            variable = owners.get(id(outermost(resource)))
            if variable is not None and (agreed or variable.differs):
                continue
            if variable is None:
                problem = (
                    f"replica {replica_id} writes a variable that was made outside of the "
                    f"context ({op.type}); it would be written once per replica."
                )
                fix = (
                    "create it (or the model, optimizer, metric or generator that holds "
                    "it) under `with repl.context():`, and only then load its values."
                )
            else:
                problem = (
                    f"replica {replica_id} writes variable {variable.name} by {op.type}, "
                    "by which the replicas would drift apart."
                )
                fix = (
                    "wrap the optimizer, repl.wrap_optimizer(optimizer); or write it by "
                    "one of the variable's own methods, assign, assign_add, ..."
                )
            where = [f"at {errors.line_of(op)}"]
            raise errors.ContextError(errors.compose(problem, where, fix))


class _Captures:
    """Looks up what inputs of traced functions stand for, in graphs inside graphs."""

    def __init__(self) -> None:
        self._external: dict[tf.Graph, dict[int, tf.Tensor]] = {}

    def outermost(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the tensor that a captured tensor is, outside of all functions."""
        while tf.is_symbolic_tensor(tensor) and tensor.graph.building_function:
            graph = tensor.graph
            if graph not in self._external:
                pairs = graph.captures
                self._external[graph] = {id(inner): outer for outer, inner in pairs}
            outer = self._external[graph].get(id(tensor))
            if outer is None:
                break
            tensor = outer
        return tensor


def _check_circles(replicas: Sequence[Sequence[tf.Operation]]) -> None:
    """Raises DeadlockError if replicas would wait for one another in a circle."""
    link = effects.find_leak(replicas)
    if link is not None:
        taker, giver = link
        raise errors.DeadlockError(
            errors.compose(
                "a replica uses a tensor of another replica directly, and communicates "
                "with it: they could wait for one another.",
                [
                    f"the tensor is made at {errors.line_of(giver)} ({giver.name})",
                    f"and used at {errors.line_of(taker)} ({taker.name})",
                ],
                "do not keep tensors of one call of step_fn for the next; hand them over "
                "by broadcast or all_gather.",
            )
        )


def _order_effects(
    settings: Settings,
    groups: Sequence[Sequence[tf.Operation]],
    ready: Sequence[tf.Operation],
    outputs: list[Any],
    graph: tf.Graph,
) -> list[Any]:
    """Orders the side effects of a step, none before all inputs are there."""
    initializers = settings.factory.initializers
    if ready:
        for ops in groups:
            for op in ops:
                if _tf.has_effect(op) and op not in initializers:
                    _tf.add_control_inputs(op, ready)
    if graph.building_function:
        effects.order_within_replicas(groups, settings.ledger.last_effects(graph))
        return outputs
    must_run = [
        op for ops in groups for op in effects.order_in_session(ops, initializers)
    ]
    if not must_run:
        return outputs
    # Whatever is fetched, the whole step happens, on all replicas: half of it would let
    # their variables drift apart.
    done = tf.group(*must_run, name="step")
    return [tf.nest.map_structure(lambda leaf: _after(done, leaf), o) for o in outputs]


def _after(done: tf.Operation, leaf: Any) -> Any:
    """Returns an output that is there when the whole step is done."""
    if leaf is None:
        return done
    if isinstance(leaf, tf.Operation):
        return tf.group(leaf, done)
    device = (
        None if isinstance(leaf, tf.SparseTensor | tf.IndexedSlices) else leaf.device
    )
    with tf.device(device), tf.control_dependencies([done]):
        return tf.nest.map_structure(tf.identity, leaf, expand_composites=True)
