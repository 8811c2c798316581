"""The passes by which a step is built, in their order: PASSES.

Each takes the draft of the step, and leaves in it what later ones need. A new pass is a
function here, or in a file of graph/ if it knows nothing but the graph, and a line in
the list.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.graph.equal import value_numbering
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import acting, has_effect
from replicator.graph.lowering import crossing, rewrite
from replicator.graph.matching import control_flow, leftover, numbering, unanswered
from replicator.graph.order import ordering, phases
from replicator.graph.passes import kernels, owners, random, reads, ties
from replicator.inputs import checks as input_checks
from replicator.inputs import feeds
from replicator.inputs.shards import Shard
from replicator.primitives import table
from replicator.stages.writing import Build
from replicator.step import (
    checks,
    constants,
    copies,
    objects,
    outputs,
    stages,
    step_arguments,
    tracing,
)
from replicator.step.draft import Built, Draft, Settings
from replicator.variables import (
    drift,
    elsewhere,
    following,
    python_calls,
    storage,
    unbuilt,
)
from replicator.variables.chooser import SPARSE

_SAME_WRITES = (
    "let all hosts write the same values, computed from the same constants; values "
    "that differ are made equal by repl.all_reduce or repl.broadcast."
)
_WRITTEN_TOGETHER = "written by one op together with what is elsewhere"


def run(
    settings: Settings,
    step_fn: Callable[..., Any],
    feed: feeds.Feed | None,
    build: context.Build,
    args: Callable[[], Sequence[Any]],
    own: Sequence[Any] = (),
) -> Built:
    """Builds a step by all passes.

    Args:
        settings: What all steps of the Replicator share.
        step_fn: The user's function, of one element if there is a feed.
        feed: Gives each replica its element.
        build: What the replicas of this build share.
        args: Returns the further arguments of step_fn, a tuple for each replica.
        own: Those of the tensors behind them that a replica is given for itself.
    """
    draft = Draft(settings, step_fn, feed, build, args, own)
    written = [s.begin(input_checks.name_of(step_fn)) for s in settings.stages]
    for apply in PASSES:
        apply(draft)
        for graphs in written:
            if apply in _STAGES:
                _STAGES[apply](graphs, draft)
    used = {id(one): one for one in build.aliases.noted().values()}
    variables = tuple(used.values())
    return Built(draft.returned, draft.communications, variables, draft.writes)


# --- Building the replicas ------------------------------------------------------------


def pull_inputs(draft: Draft) -> None:
    """Pulls what each replica is fed, before all else."""
    if draft.settings.chooser is not None:
        trained = draft.settings.factory.trained().items()
        draft.settled = {
            path: following.undecided(variable)[0].storage.settlement
            for path, variable in trained
            if following.undecided(variable)
        }
    ops = draft.build.graph.get_operations()
    draft.previous = [op for op in ops if not _tf.is_abandoned(op)]
    with tf.name_scope("inputs"):
        draft.elements = None if draft.feed is None else draft.feed.pull()
        draft.further = draft.args()


def call_step_fn(draft: Draft) -> None:
    """Calls step_fn once per replica, in replica order, or for two of them."""
    build = draft.build
    large = constants.Constants(build)
    for n, replica_id in enumerate(build.traced):
        if n == 1:
            copies.bring_handles(draft.settings.factory, build)
        start = _tf.operation_count(build.graph)
        draft.seeds.append(_tf.seeds_counted(build.graph))
        with contextlib.suppress(context.Waiting):
            arguments, shard = _arguments(draft, n)
            own, scope = tracing.build_replica(
                draft.step_fn, arguments, build, replica_id, large, shard
            )
            draft.returned.append(own)
            draft.scopes.append(scope)
        storage.meet_needs(build)
        draft.ranges.append((start, _tf.operation_count(build.graph)))


def _arguments(draft: Draft, n: int) -> tuple[list[Any], Shard | None]:
    """Returns what step_fn is called with, and its part of all examples, if known."""
    further = draft.further[n]
    if draft.elements is None:
        return list(further), None
    element, shard = draft.elements[n], None
    if draft.feed is not None and draft.feed.divides:
        shard = element
        element = shard.element
    return step_arguments.arranged(draft.step_fn, element, further), shard


def follow_strategy(draft: Draft) -> None:
    """Has a strategy decide on variables that it could not decide on before.

    Raises:
        BuildAgain: Some are elsewhere now, or kept equal in another way.
        StrategyError: A rule of the strategy is of no variable that there is.
    """
    chooser = draft.settings.chooser
    if chooser is None:
        return
    chooser.check()
    if not chooser.undecided:
        return
    factory = draft.settings.factory
    variables = factory.trained()
    sparse = draft.build.findings.get(SPARSE, {})
    known = {p: sparse[v.key] for p, v in variables.items() if v.key in sparse}
    for path, variable in variables.items():
        for one in following.undecided(variable):
            # An optimizer has read them where it created its slots: in this step.
            one.storage.settlement = draft.settled.get(path)
    decided = chooser.decide(known)
    changed = [
        path
        for path, chosen in decided.items()
        if path in variables and following.follow(factory, variables[path], chosen)
    ]
    chooser.followed()
    if changed:
        draft.build.knowledge.update({("decided", path): True for path in changed})
        raise context.BuildAgain


def check_results(draft: Draft) -> None:
    """Checks what the replicas exchanged while they were built, and returned."""
    objects.check(draft.build, draft.settings.peers)
    unbuilt.check(draft.build)
    copies.check_captures(draft.build)
    checks.check_outputs(draft.returned, draft.build.world, draft.step_fn)


def divide_ops(draft: Draft) -> None:
    """Says which ops are whose."""
    build, ops = draft.build, draft.build.graph.get_operations()
    aliases = build.aliases.ops()
    draft.replicas = [
        [op for op in ops[begin:end] if op not in aliases]
        for begin, end in draft.ranges
    ]
    draft.replicas = ties.resolve(
        *(draft.replicas, build.traced, [t for t in draft.leaves() if tf.is_tensor(t)]),
        *(draft.settings.factory.in_parts(), draft.settings.factory.initializers),
    )
    if build.in_functions:
        numbering.close_gaps(draft.replicas, build.traced)


def copy_replicas(draft: Draft) -> None:
    """Adds copies for the replicas for which step_fn was not called."""
    build = draft.build
    if build.traced == build.world.local:
        return
    elements = draft.elements or [None] * build.world.num_local
    made = copies.make(
        draft.settings.factory,
        build,
        [*zip(elements, draft.further, strict=True)],
        draft.replicas,
        draft.returned,
        draft.scopes,
        draft.seeds,
    )
    for ops, returned in made:
        draft.replicas = [*draft.replicas, ops]
        draft.returned.append(returned)


# --- Checks ---------------------------------------------------------------------------


def check_effects(draft: Draft) -> None:
    """Checks what the replicas do beside computing; copies do as their originals."""
    build, factory = draft.build, draft.settings.factory
    traced = draft.replicas[: len(build.traced)]
    draft.flow = switching.Flow(draft.ops())
    control_flow.check_switches(draft.ops(), draft.flow)
    if draft.several:
        draft.active = acting(traced)
        checks.check_components(factory, draft.active, build)
        checks.check_writes(factory, draft.active, build, draft.flow)
        checks.check_circles(traced)
    python_calls.note(traced)
    random.check(draft.replicas, build.world.local)


def answer_messages(draft: Draft) -> None:
    """Gives zeros as gradients to messages of which nobody makes anything."""
    build = draft.build
    ops = build.graph.get_operations()
    draft.own = len(ops)
    first = draft.ranges[0][0]
    draft.earlier = [op for op in ops[:first] if not _tf.is_abandoned(op)]
    if build.messages:
        draft.replicas = unanswered.answer(
            draft.replicas, draft.returned, build.world.local
        )


def check_equality(draft: Draft) -> None:
    """Checks that all calls pair, and that no write lets replicas drift apart."""
    build, factory = draft.build, draft.settings.factory
    draft.initializers = ordering.with_sources(factory.initializers, draft.replicas)
    labels = value_numbering.Labels(draft.flow)
    owned = build.aliases.label(labels)
    draft.handles = owners.Handles(labels, owned, build.world)
    ops = set(draft.replicas[0]).difference(draft.initializers)
    draft.writes = any(draft.handles.written(op) for op in ops)
    what = f"builds {input_checks.name_of(draft.step_fn)}"
    draft.elsewhere = rewrite.check(
        draft.replicas, draft.handles, draft.settings.peers, what
    )
    if draft.several:
        equal = drift.check(
            *(factory, build, draft.active, draft.initializers, draft.flow),
            _own_inputs(draft),
        )
        if draft.settings.peers is not None:
            draft.settings.peers.same("writes variables", equal, _SAME_WRITES)
            used = {id(one): one for one in build.aliases.noted().values()}
            elsewhere.check_equal(draft.settings.peers, used.values())


def _own_inputs(draft: Draft) -> set[int] | None:
    """Returns the ids of what a replica is given for itself, if it is alone here."""
    world = draft.build.world
    if world.num_local > 1 or world.num_replicas == 1:
        return None
    given = (draft.elements, list(draft.own_args))
    return set(map(id, tf.nest.flatten(given, expand_composites=True)))


# --- Communication, and what it makes possible ----------------------------------------


def lower(draft: Draft) -> None:
    """Puts real ops in the places of placeholders."""
    assert draft.handles is not None, "known since the checks"
    try:
        rewritten = rewrite.rewrite(
            draft.replicas,
            draft.build.world,
            table.LOWERINGS,
            draft.initializers,
            draft.settings.options.policy,
            draft.handles,
            draft.flow,
            _ways(draft),
        )
    except owners.SeveralOwners as several:
        needs = [
            storage.Need(shared.variable, _WRITTEN_TOGETHER, errors.line_of(op))
            for op, written in several.found
            for shared in written
        ]
        storage.mirror(draft.build, needs)
    draft.replicas = rewritten.replicas
    draft.communications = rewritten.communications
    draft.sharing = draft.build.aliases.resolve()
    draft.flow = switching.Flow(draft.ops())


def _ways(draft: Draft) -> crossing.Ways | None:
    """Returns the ways to the replicas that other processes build, if there are any."""
    peers = draft.settings.peers
    if peers is None or draft.elsewhere is None:
        return None
    return crossing.Ways(draft.elsewhere, peers.own, peers.order)


def read_once(draft: Draft) -> None:
    """Reads each variable once between two writes, and of some only rows."""
    initializers, flow = draft.initializers, draft.flow
    reads.join_reads(acting(draft.replicas), initializers, flow)
    draft.replicas = reads.read_rows(draft.replicas, initializers, flow)
    draft.active = acting(draft.replicas)
    reads.share_reads(draft.active, initializers, draft.sharing, flow)


def turn_products(draft: Draft) -> None:
    """Makes products that are slow on CPUs the other way around."""
    if draft.settings.options.kernels:
        kernels.replace(draft.replicas, draft.flow)


# --- Effects and results --------------------------------------------------------------


def order_effects(draft: Draft) -> None:
    """Orders the side effects of a step, none before all inputs are there.

    In a plain tf.Graph there is an op then that runs when all effects have happened, if
    there are any; a function runs them by itself.
    """
    lowered = draft.build.graph.get_operations()[draft.own :]
    feed, fed = draft.feed, draft.elements is not None
    ready = feed.ready(draft.elements) if feed is not None and fed else []
    replicas, initializers, flow = draft.active, draft.initializers, draft.flow
    merged = {op for ops in replicas for op in ops}.intersection(lowered)
    added = [op for op in lowered if op not in merged and not _tf.is_abandoned(op)]
    own = [*replicas, added]
    acts = [
        [op for op in ops if has_effect(op) and op not in initializers] for ops in own
    ]
    if ready:
        _wait(acts, ready, flow)
    results = [
        leaf.op if tf.is_tensor(leaf) else leaf
        for leaf in draft.leaves()
        if leaf is not None
    ]
    graph, ledger = draft.build.graph, draft.build.ledger
    fitting = ledger.optimizers_ops(graph) if draft.several else None
    separate = functools.partial(
        phases.separate, left_out=initializers, flow=flow, fitting=fitting
    )
    if graph.building_function:
        before = ordering.order_in_function(
            replicas, added, merged, draft.earlier, initializers, bool(draft.sharing)
        )
        must_run = [op for ops in acts for op in ops]
        end = None if _tf.is_step(graph) else ordering.marker("written")
        separate([*must_run, *results], before, earlier=draft.previous, end=end)
        return
    must_run = ordering.order_in_session(replicas, added, initializers, flow)
    separate([*must_run, *results], {})
    done = flow.after(must_run)
    draft.done = tf.group(*done, name="step") if done else None


def _wait(
    acts: Sequence[Sequence[tf.Operation]],
    ready: Sequence[tf.Operation],
    flow: switching.Flow,
) -> None:
    """Lets ops with effects, those of each replica, wait until all inputs are there."""
    for ops in acts:
        if ops:
            with tf.device(ops[0].device), tf.control_dependencies(ready):
                gate = tf.no_op("inputs_are_there")  # one edge between two devices
            for op in ops:
                flow.let_wait(op, [gate])


def seal_results(draft: Draft) -> None:
    """Makes what step_fn returned fit to leave the step."""
    if draft.several:
        draft.returned = tf.nest.map_structure(outputs.seal, draft.returned)
    if not draft.build.graph.building_function:
        # Whatever is fetched, the whole step happens, on all replicas: half of it would
        # let their variables drift apart.
        draft.returned = tf.nest.map_structure(
            lambda leaf: outputs.after(draft.done, leaf), draft.returned
        )


def check_leftovers(draft: Draft) -> None:
    """Refuses a step in which a placeholder is left."""
    leftover.check(draft.ops(), draft.returned)


PASSES: tuple[Callable[[Draft], None], ...] = (
    pull_inputs,
    call_step_fn,
    follow_strategy,
    check_results,
    divide_ops,
    copy_replicas,
    check_effects,
    answer_messages,
    check_equality,
    lower,
    read_once,
    turn_products,
    order_effects,
    seal_results,
    check_leftovers,
)
# What is written down of the step after some of them; see `Replicator.stages`.
_STAGES: dict[Callable[[Draft], None], Callable[[Build, Draft], None]] = {
    divide_ops: stages.traced,
    copy_replicas: stages.copied,
    check_leftovers: stages.done,
}
