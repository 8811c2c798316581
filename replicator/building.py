"""Builds a step: once per device, then matched, lowered and rewired.

The order of things, for one build:

1. pull the inputs of all replicas;
2. call step_fn once per device, in replica order, under that device;
3. check that the replicas returned alike, then match, lower and rewire (graph/);
4. check and order the side effects;
5. give back what step_fn returned for each replica.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import tensorflow as tf

from replicator import (
    _tf,
    checks,
    context,
    copies,
    distribute,
    inputs,
    outputs,
    scopes,
)
from replicator.creation import VariableFactory
from replicator.graph import (
    effects,
    kernels,
    ordering,
    owners,
    random,
    reads,
    record,
    rewrite,
    sameness,
)
from replicator.graph.kinds import acting, has_effect
from replicator.options import Options
from replicator.primitives import objects, table


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """What all steps of one Replicator share.

    Attributes:
        devices: `devices[r]` is where replica r runs.
        options: What the user chose.
        factory: Makes the variables.
        ledger: Where writes that keep replicas equal are entered.
        lock: Held while a step is built: variables and writes are those of all steps.
    """

    devices: tuple[str, ...]
    options: Options
    factory: VariableFactory
    ledger: effects.Ledger
    lock: threading.RLock = dataclasses.field(default_factory=threading.RLock)


@dataclasses.dataclass(frozen=True)
class Built:
    """A step that stands in a graph.

    Attributes:
        returned: `returned[r]` is what step_fn returned for replica r, as tensors.
        communications: What the replicas communicate, calls before gradients on each
            level of the graph.
    """

    returned: list[Any]
    communications: tuple[record.Communication, ...]


def placer(device: str, aliases: owners.Aliases) -> Callable[[tf.Operation], str]:
    """Returns a device function that fills in what the user's own tf.device left open.

    A function and not a string: in a tf.Graph, a tf.function that is called inside the
    step is traced anew for each device function, and so gets each replica's own
    variables and communicates in each build for itself. Where the step itself is a
    function, `_tf.tracing_apart` sees to that.
    """
    default = tf.DeviceSpec.from_string(device)
    merged = {"": device}

    def place(op: tf.Operation) -> str:
        at_owner = aliases.device_for(op)
        if at_owner is not None:
            return at_owner
        own = op.device
        if own not in merged:
            spec = default.make_merged_spec(tf.DeviceSpec.from_string(own))
            merged[own] = spec.to_string()
        return merged[own]

    return place


def build_step(
    settings: Settings,
    step_fn: Callable[..., Any],
    feed: inputs.Feed | None,
    graph: tf.Graph,
) -> Built:
    """Builds a step into `graph`, with all of its communication in place.

    Args:
        settings: What all steps of the Replicator share.
        step_fn: The user's function, of one element if there is a feed.
        feed: Gives each replica its element.
        graph: The default graph.
    """
    with _collecting_later():
        return _build_until_known(settings, step_fn, feed, graph)


def _build_until_known(
    settings: Settings,
    step_fn: Callable[..., Any],
    feed: inputs.Feed | None,
    graph: tf.Graph,
) -> Built:
    """Builds, once more whenever an attempt learns what the next has to know."""
    knowledge: dict[Any, Any] = {}
    while True:
        known = dict(knowledge)
        start = _tf.operation_count(graph)
        build = context.Build(
            settings.devices,
            settings.options,
            graph,
            settings.ledger,
            owners.Aliases(graph, settings.devices),
            knowledge,
        )
        try:
            with _creating_variables(settings.factory), _tf.ordered_branches(graph):
                return _attempt(settings, step_fn, feed, build)
        except context.BuildAgain:
            _abandon(graph, start)
            assert knowledge != known, "a build that learned nothing asked for another"
        except BaseException:
            _abandon(graph, start)
            raise


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
) -> Built:
    graph = build.graph
    with tf.name_scope("inputs"):
        elements = None if feed is None else feed.pull()
    returned, ranges, scopes = [], [], []
    for replica_id in range(build.num_traced):
        if replica_id == 1:
            copies.bring_handles(settings.factory, build)
        start = _tf.operation_count(graph)
        arguments = [] if elements is None else [elements[replica_id]]
        with contextlib.suppress(context.Waiting):
            own, scope = _build_replica(settings, step_fn, arguments, build, replica_id)
            returned.append(own)
            scopes.append(scope)
        ranges.append((start, _tf.operation_count(graph)))
    objects.check(build)
    checks.check_outputs(returned, build.devices)
    ops = graph.get_operations()
    aliases = build.aliases.ops()
    replicas = [
        [op for op in ops[begin:end] if op not in aliases] for begin, end in ranges
    ]
    traced = list(replicas)
    if build.num_traced < build.num_replicas:
        made = copies.make(
            settings.factory, build, elements, replicas, returned, scopes
        )
        for own_ops, own in made:
            replicas.append(own_ops)
            returned.append(own)
    if build.num_replicas > 1:  # and copies do as those that they are copied from
        active = acting(traced)
        checks.check_components(settings.factory, active, build.aliases)
        checks.check_writes(settings.factory, settings.ledger, active, build.aliases)
        checks.check_circles(traced)
    random.check(replicas)
    start = _tf.operation_count(graph)
    earlier = [op for op in ops[: ranges[0][0]] if not _tf.is_abandoned(op)]
    initializers = ordering.with_sources(settings.factory.initializers, replicas)
    labels = sameness.Labels()
    shared = build.aliases.label(labels)
    rewritten = rewrite.rewrite(
        replicas,
        build.devices,
        table.LOWERINGS,
        initializers,
        settings.options.policy,
        owners.Handles(labels, shared, build.devices),
    )
    replicas = rewritten.replicas
    shared_handles = build.aliases.resolve()
    reads.join_reads(acting(replicas), initializers)
    replicas = reads.read_rows(replicas, initializers)
    active = acting(replicas)
    reads.share_reads(active, initializers, shared_handles)
    kernels.replace(replicas)
    lowered = graph.get_operations()[start:]
    ready = [] if feed is None or elements is None else feed.ready(elements)
    done = _order_effects(
        initializers, active, lowered, earlier, ready, bool(shared_handles)
    )
    if build.num_replicas > 1:
        returned = tf.nest.map_structure(outputs.seal, returned)
    if not graph.building_function:
        # Whatever is fetched, the whole step happens, on all replicas: half of it would
        # let their variables drift apart.
        returned = tf.nest.map_structure(
            lambda leaf: outputs.after(done, leaf), returned
        )
    return Built(returned, rewritten.communications)


def _build_replica(
    settings: Settings,
    step_fn: Callable[..., Any],
    arguments: Sequence[Any],
    build: context.Build,
    replica_id: int,
) -> tuple[Any, str]:
    """Calls step_fn for one replica; returns its outputs as tensors, and its scope."""
    graph = build.graph
    function = _tf.function_of(step_fn)
    with (
        scopes.kept_caching_device(),
        graph.device(placer(build.devices[replica_id], build.aliases)),
        tf.name_scope(f"replica_{replica_id}") as scope,
        random.separate_seeds(graph, replica_id),
        _tf.tracing_apart(graph, (build.number, replica_id)) as trace_anew,
        scopes.shared_variables(build, replica_id),
    ):
        replica = context.ReplicaContext(
            build,
            replica_id,
            step_key=(id(step_fn), None if graph.building_function else graph),
            scope=scope,
            depth=_tf.stack_depth(),
            trace_anew=trace_anew,
        )
        with context.building(replica), distribute.answering(replica):
            if graph.building_function:
                returned = _tf.call_converted(function, arguments)
            else:
                returned = function(*arguments)
            return tf.nest.map_structure(outputs.as_output, returned), scope


def _order_effects(
    initializers: Set[tf.Operation],
    replicas: Sequence[Sequence[tf.Operation]],
    lowered: Sequence[tf.Operation],
    earlier: Sequence[tf.Operation],
    ready: Sequence[tf.Operation],
    sharing: bool,
) -> tf.Operation | None:
    """Orders the side effects of a step, none before all inputs are there.

    Args:
        initializers: Ops that initialise variables, which are no part of the step.
        replicas: The ops of each replica.
        lowered: The ops that were added once all replicas were built.
        earlier: The ops that stand in the graph before the step.
        ready: Run when all inputs are there.
        sharing: Whether replicas use variables of one another.

    Returns:
        In a plain tf.Graph, an op that runs when all effects have happened, if there
        are any; a function runs them by itself.
    """
    merged = {op for ops in replicas for op in ops}.intersection(lowered)
    added = [op for op in lowered if op not in merged and not _tf.is_abandoned(op)]
    for ops in [*replicas, added] if ready else ():
        waiting = [op for op in ops if has_effect(op) and op not in initializers]
        if not waiting:
            continue
        with tf.device(waiting[0].device), tf.control_dependencies(ready):
            gate = tf.no_op("inputs_are_there")  # one edge per replica between devices
        for op in waiting:
            _tf.add_control_inputs(op, [gate])
    if tf.compat.v1.get_default_graph().building_function:
        ordering.order_in_function(
            replicas, added, merged, earlier, initializers, sharing
        )
        return None
    must_run = ordering.order_in_session(replicas, added, initializers)
    return tf.group(*must_run, name="step") if must_run else None
