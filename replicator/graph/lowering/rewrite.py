# SPDX-License-Identifier: Apache-2.0
"""Replaces matched placeholders by real cross-device ops, on every graph level.

Runs once per build, after all replicas are built. Conditionals, loops and function
calls with communication inside are merged into one op each (merge.py), and rewritten
inside in the same way. `rewrite` is the only place that changes what the user built:
all decisions on a level are made first, on facts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

import tensorflow as tf

from replicator._tf import ops as tf_ops
from replicator.cluster.peers import Peers
from replicator.costs import cost, hosts
from replicator.graph.ir.placeholder import Call, Placeholder
from replicator.graph.lowering import crossing, fence, merge, schedule, unread
from replicator.graph.lowering.matched import Lowering, Matched, Notes
from replicator.graph.lowering.record import Communication, Nesting, links, wires
from replicator.graph.matching import (
    control_flow,
    deadlock,
    elsewhere,
    gradients,
    match,
)
from replicator.graph.passes import owners, precision
from replicator.world import World


@dataclasses.dataclass(frozen=True)
class _Lowered:
    """One lowered communication, before it is recorded.

    Attributes:
        communication: The communication.
        sent: `sent[n]` is what participant n sends, or what is sent in its place.
        results: What the lowering returned.
        readers: `readers[n][k]` are the ops that read participant n's k-th result.
        nesting: The control flow around it.
    """

    communication: Matched
    sent: Sequence[Sequence[tf.Tensor]]
    results: Sequence[Sequence[tf.Tensor]]
    readers: Sequence[Sequence[Sequence[tf.Operation]]]
    nesting: Nesting


@dataclasses.dataclass(frozen=True)
class Target:
    """Everything that lowering depends on, and its results so far.

    Attributes:
        world: All replicas, and which of them are built here.
        lowerings: The lowering of each primitive.
        hubs: Assigns devices to shared work.
        policy: Everything else that decides how communication is lowered.
        handles: Identifies values and variables that are the same on all replicas.
        initializers: Ops that initialise variables and so are not part of the step.
        precise: Whether to prevent TensorFlow from treating replicas differently.
        lowered: The communications lowered so far.
        pruned: The removed writes, and the ops that only they would have used.
        ways: The channels to replicas built by other processes; None if there are none.
        calls: All calls of the local replicas, on any level; for messages.
    """

    world: World
    lowerings: Mapping[str, Lowering]
    hubs: cost.Hubs
    policy: cost.Policy
    handles: owners.Handles
    initializers: Set[tf.Operation]
    precise: bool = False
    lowered: list[_Lowered] = dataclasses.field(default_factory=list)
    pruned: set[tf.Operation] = dataclasses.field(default_factory=set)
    ways: crossing.Ways | None = None
    calls: list[Call] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """The result of rewriting a build.

    Attributes:
        replicas: The ops of each replica, with merged ops in place of those they
            replace.
        communications: The lowered communications, calls before gradients on each
            level.
        pruned: Ops that will not run, since only removed writes would have used them.
    """

    replicas: list[list[tf.Operation]]
    communications: tuple[Communication, ...]
    pruned: Set[tf.Operation] = frozenset()


def check(
    replicas: Sequence[Sequence[tf.Operation]],
    handles: owners.Handles,
    peers: Peers | None = None,
    what: str = "a step",
) -> elsewhere.Elsewhere | None:
    """Raises unless all communication of a build pairs; changes nothing.

    Args:
        replicas: `replicas[n]` are the ops of a local replica's sub-graph, in build
            order.
        handles: Identifies variables owned by one replica and shared by all.
        peers: The processes that build the other replicas, if any.
        what: What is being built, for messages.

    Returns:
        The calls of all replicas, if other processes build some.

    Raises:
        MismatchError: The replicas' calls do not pair.
        ReplicatorError: A call is where no other replica can join.
    """
    sites = [
        control_flow.find_sites(ops, r, handles)
        for r, ops in zip(handles.world.local, replicas, strict=True)
    ]
    if peers is not None:
        reports = [
            elsewhere.report_of(*sites_and_ops)
            for sites_and_ops in zip(sites, replicas, strict=True)
        ]
        return elsewhere.check(peers, handles.world, reports, what)
    calls = [_all_calls(s) for s in sites]
    differentiates = any(
        call.backward for replica_calls in calls for call in replica_calls
    )
    passes = [gradients.passes(ops) for ops in replicas] if differentiates else []
    match.check(calls, [_inside(s) for s in sites], passes)
    return None


def rewrite(
    replicas: Sequence[Sequence[tf.Operation]],
    world: World,
    lowerings: Mapping[str, Lowering],
    initializers: Set[tf.Operation],
    policy: cost.Policy,
    handles: owners.Handles,
    ways: crossing.Ways | None = None,
) -> Rewritten:
    """Lowers and rewires all communication of a build that `check` has accepted.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph, in build order.
        world: All replicas, and which of them are built here.
        lowerings: The lowering of each primitive.
        initializers: Ops that initialise variables and so are not part of the step.
        policy: The user's choices of how communication is lowered.
        handles: Identifies variables owned by one replica and shared by all.
        ways: The channels to replicas built by other processes, if any.

    Raises:
        MismatchError: The replicas' calls do not pair.
        DeadlockError: The replicas would wait for one another in a cycle.
        ReplicatorError: A call is where no other replica can join.
    """
    hubs = cost.Hubs(world.devices)
    target = Target(
        world,
        lowerings,
        hubs,
        policy,
        handles,
        initializers,
        precise=precision.may_be_lowered(),
        ways=ways,
    )
    rewritten = _rewrite_level(replicas, world.local, target, Nesting())
    communications = tuple(_recorded(lowered, target) for lowered in target.lowered)
    return Rewritten(rewritten, communications, target.pruned)


def _all_calls(
    sites: Sequence[Placeholder | control_flow.Region],
) -> list[Call]:
    """Returns a replica's distinct calls, including those inside control flow."""
    return list({call.key: call for site in sites for call in site.calls}.values())


def _inside(sites: Sequence[Placeholder | control_flow.Region]) -> dict[str, str]:
    """Maps the keys of calls inside control flow to the construct around them."""
    regions = [site for site in sites if isinstance(site, control_flow.Region)]
    return {call.key: site.construct for site in regions for call in site.calls}


def _rewrite_level(
    replicas: Sequence[Sequence[tf.Operation]],
    replica_ids: Sequence[int],
    target: Target,
    nesting: Nesting,
) -> list[list[tf.Operation]]:
    """Rewrites one graph; `replicas[n]` are the ops of `replica_ids[n]`."""
    sites = [
        control_flow.find_sites(ops, r, target.handles)
        for ops, r in zip(replicas, replica_ids, strict=True)
    ]
    if not nesting.path:
        target.calls.extend(
            c for replica_sites in sites for site in replica_sites for c in site.calls
        )
    nodes = match.pair(sites, target.world.local, target.calls)
    for ops, replica_sites in zip(replicas, sites, strict=True):
        fence.put_up(ops, replica_sites, target.initializers)
    deadlock.check(nodes, sites, replicas)
    merged: dict[tf.Operation, tf.Operation] = {}
    for node in nodes:
        calls = [site for site in node if isinstance(site, Placeholder)]
        regions = [site for site in node if not isinstance(site, Placeholder)]
        if calls:
            results = _lower(calls, target, nesting)
            if calls[0].call.facts.same_for_all:
                target.handles.labels.join(results)
            _rewire(calls, results)
            if calls[0].call.facts.orders_effects:
                fence.join([call.op for call in calls], _way(calls[0].call, target))
            if nesting.path:
                # A session inlines functions, and may not prune what they hold.
                tf_ops.abandon([call.op for call in calls])
        else:
            new = merge.merge(
                regions,
                lambda inner, ids, at: _rewrite_level(inner, ids, target, at),
                target.handles.labels,
                nesting,
                target.ways,
            )
            merged.update({region.op: new for region in regions})
    replicas = _with(merged, replicas)
    others = owners.keep_owners_writes(
        replicas, replica_ids, target.handles, target.initializers
    )
    target.pruned.update(unread.ops(others))
    return _with(others, replicas)


def _with(
    replaced: Mapping[tf.Operation, tf.Operation],
    replicas: Sequence[Sequence[tf.Operation]],
) -> list[list[tf.Operation]]:
    """Returns each replica's ops, some of them replaced by others."""
    if not replaced:
        return [list(ops) for ops in replicas]
    return [[replaced.get(op, op) for op in ops] for ops in replicas]


def _lower(
    matched: Sequence[Placeholder], target: Target, nesting: Nesting
) -> Sequence[Sequence[tf.Tensor]]:
    """Adds the real ops of one communication; returns results by local participant."""
    call = matched[0].call
    # Every participant's result waits for what any participant's call waits for.
    before = [op for p in matched for op in p.op.control_inputs]
    with tf.control_dependencies(None), tf.control_dependencies(before):
        with tf.name_scope(call.scope):
            communication = _matched(matched, target)
            results = target.lowerings[call.primitive](communication)
    if len(communication.calls) > len(matched):  # keep the local replicas' results
        ids = [p.replica_id for p in matched]
        results = [results[communication.group.index(r)] for r in ids]
    sent = [list(tensors) for tensors in communication.operands]
    for n, tensor in communication.notes.moved:
        sent[n].append(tensor)
    readers = [[result.consumers() for result in p.results] for p in matched]
    target.lowered.append(_Lowered(communication, sent, results, readers, nesting))
    if target.precise and call.facts.same_for_all:
        with tf.name_scope("keep_precision"), tf.control_dependencies(None):
            results = precision.keep(results)
    return results


def _matched(matched: Sequence[Placeholder], target: Target) -> Matched:
    """Returns the communication of local participants and, if there are any, others."""
    devices = tuple(target.world.device(p.replica_id) for p in matched)
    here = Matched(
        calls=tuple(p.call for p in matched),
        operands=tuple(p.operands for p in matched),
        devices=devices,
        hubs=target.hubs,
        policy=target.policy,
    )
    call = matched[0].call
    ordering = call.facts.orders_effects  # passes no tensors
    way = None if ordering else _way(call, target)
    if way is None or target.ways is None:
        return here
    calls = target.ways.elsewhere.partners(call)
    if crossing.adds_up(calls):
        way.factors = target.ways.elsewhere.by_factors(call, target.policy)
        return dataclasses.replace(here, crossing=way)
    for member in calls:
        crossing.check(member)
    local_operands = {p.replica_id: p.operands for p in matched}
    processes = [target.world.processes[c.replica_id] for c in calls]
    passed = crossing.exchanged(
        way,
        processes,
        [c.operands for c in calls],
        [local_operands.get(c.replica_id) for c in calls],
    )
    local_devices = dict(zip(local_operands, devices, strict=True))
    return Matched(
        calls=tuple(calls),
        operands=tuple(map(tuple, passed)),
        devices=tuple(local_devices.get(c.replica_id, devices[0]) for c in calls),
        hubs=target.hubs,
        # Other algorithms depend on choices that may differ between processes.
        policy=dataclasses.replace(target.policy, algorithm="hub", factors=False),
        notes=Notes(["gathered from hosts"]),
    )


def _way(call: Call, target: Target) -> crossing.Crossing | None:
    """Returns the channel between a call's participants, if some are not local."""
    return None if target.ways is None else target.ways.of(call)


def _recorded(lowered: _Lowered, target: Target) -> Communication:
    """Returns the record of a communication, once all writes are known."""
    communication = lowered.communication
    algorithms = tuple(dict.fromkeys(communication.notes.algorithms))
    if target.ways is not None:
        calls = tuple(target.ways.elsewhere.partners(communication.calls[0]))
        return Communication(calls, (), lowered.nesting, algorithms)
    results = _read_results(lowered, target.pruned)
    transfers = communication.group, lowered.sent, results, target.world.devices
    record = Communication(
        communication.calls, links(*transfers), lowered.nesting, algorithms
    )
    if not hosts.are_several(target.world.devices):
        return record
    calibration = target.policy.calibration
    devices = communication.devices
    return dataclasses.replace(
        record,
        wires=wires(*transfers, calibration),
        seconds=schedule.seconds(lowered.sent, results, devices, calibration),
    )


def _read_results(
    lowered: _Lowered, pruned: Set[tf.Operation]
) -> list[list[tf.Tensor]]:
    """Returns each participant's results, less those that only pruned ops read."""
    return [
        [
            tensor
            for k, tensor in enumerate(tensors)
            if k >= len(readers) or not readers[k] or not pruned >= set(readers[k])
        ]
        for tensors, readers in zip(lowered.results, lowered.readers, strict=True)
    ]


def _rewire(
    matched: Sequence[Placeholder], results: Sequence[Sequence[tf.Tensor]]
) -> None:
    """Points all consumers of the placeholders at the real results."""
    for placeholder, tensors in zip(matched, results, strict=True):
        for old, new in zip(placeholder.results, tensors, strict=True):
            tf_ops.replace(old, new)
        if placeholder.receipt is not None:
            tf_ops.replace(placeholder.receipt, tf.zeros([]))
