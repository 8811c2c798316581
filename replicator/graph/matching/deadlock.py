# SPDX-License-Identifier: Apache-2.0
"""Detects cycles of replicas waiting for one another, before anything runs.

Communication in a replica's own code happens in program order, as in torch.distributed
and MPI: everything after a collective or a recv waits for it, while a send never
blocks. Users do not choose the order in which gradients are built, so there only data
dependencies count.

Runs on each graph level once the ops to merge are grouped; changes nothing.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Sequence, Set

import tensorflow as tf

from replicator import errors
from replicator._tf import effects
from replicator.graph.ir import walk
from replicator.graph.matching.match import Site

Node = tuple[Site, ...]  # ops that are merged into one


def check(
    nodes: Sequence[Node],
    sites: Sequence[Sequence[Site]],
    replicas: Sequence[Sequence[tf.Operation]],
) -> None:
    """Raises unless some order of one level's communication suits all replicas.

    Args:
        nodes: The groups of ops that are merged into one.
        sites: `sites[n]` are one replica's communicating ops, in order.
        replicas: `replicas[n]` are all ops of that replica on this level, in order.

    Raises:
        DeadlockError: There is no such order; the message lists the cycle. Or a replica
            communicates while it holds a mutex for which the others wait.
    """
    shared = _shared_mutexes(replicas)
    for replica_sites, ops in zip(sites, replicas, strict=True):
        if shared:
            _refuse_locked(replica_sites, ops, shared)
    if one_order(nodes, sites):
        return  # nearly always
    pairs = [
        (replica_sites[before], replica_sites[after])
        for replica_sites, ops in zip(sites, replicas, strict=True)
        for before, after in waits(replica_sites, ops)
    ]
    refuse(nodes, pairs)


def one_order(nodes: Sequence[Node], sites: Sequence[Sequence[Site]]) -> bool:
    """Whether program order alone gives an order that suits all replicas.

    Args:
        nodes: The groups of ops that are merged into one.
        sites: `sites[n]` are one replica's communicating ops, in order.
    """
    in_order = [
        (before, after)
        for replica_sites in sites
        for before, after in zip(replica_sites, replica_sites[1:], strict=False)
    ]
    return _find_cycle(nodes, in_order) is None


def waits(sites: Sequence[Site], ops: Sequence[tf.Operation]) -> list[tuple[int, int]]:
    """Returns which of a replica's communicating ops must wait for which.

    Args:
        sites: The communicating ops, in order.
        ops: All ops of the replica on this level, in order.

    Returns:
        Pairs (before, after) of indices into `sites`.
    """
    place = {id(site): n for n, site in enumerate(sites)}
    pairs = [*_program_order(sites), *_data_order(sites, ops)]
    return [(place[id(before)], place[id(after)]) for before, after in pairs]


def refuse(nodes: Sequence[Node], pairs: Sequence[tuple[Site, Site]]) -> None:
    """Raises DeadlockError if the pairs form a cycle.

    Args:
        nodes: The groups of ops that are merged into one.
        pairs: (before, after), of all replicas.
    """
    cycle = _find_cycle(nodes, pairs)
    if cycle is not None:
        _raise(cycle)


def _shared_mutexes(replicas: Sequence[Sequence[tf.Operation]]) -> set[int]:
    """Returns the ids of the mutexes that several replicas lock."""
    locked_before: set[int] = set()
    shared: set[int] = set()
    for ops in replicas:
        locked = {id(op.inputs[0]) for op in ops if op.type == "MutexLock"}
        shared |= locked_before & locked
        locked_before |= locked
    return shared


def _refuse_locked(
    sites: Sequence[Site], ops: Sequence[tf.Operation], shared: Set[int]
) -> None:
    """Raises if a replica communicates in a tf.CriticalSection that others enter, too.

    The one that holds the mutex would wait for the others, and they for the mutex.
    """
    site_of = {site.op: site for site in sites}
    nothing: frozenset[tf.Operation] = frozenset()
    acquired: dict[tf.Operation, frozenset[tf.Operation]] = {}  # locks above each op
    released: dict[tf.Operation, frozenset[tf.Operation]] = {}
    for op in ops:
        sources = walk.waits_for(op)
        acquired[op] = nothing.union(
            *(acquired.get(source, nothing) for source in sources)
        )
        released[op] = nothing.union(
            *(released.get(source, nothing) for source in sources)
        )
        if op.type == "MutexLock" and id(op.inputs[0]) in shared:
            acquired[op] |= {op}
        elif op.type == "ConsumeMutexLock":
            released[op] |= {op.inputs[0].op}
        site = site_of.get(op)
        if site is None or not acquired[op] - released[op]:
            continue
        if any(len(call.group) > 1 for call in site.calls):
            raise errors.DeadlockError(
                "a replica communicates inside tf.CriticalSection.execute, where it "
                "would wait for the others, which wait until it leaves.",
                [site.site()],
                "communicate before or after execute; a variable of which all replicas "
                "get the mean is assigned outside of it, too.",
            )


def _program_order(sites: Sequence[Site]) -> list[tuple[Site, Site]]:
    """Returns the pairs (before, after) that a replica's own code puts in order."""
    pairs: list[tuple[Site, Site]] = []
    last: Site | None = None
    for site in sites:
        if all(call.backward for call in site.calls):
            continue
        if last is not None:
            pairs.append((last, site))
        if not _is_send(site):
            last = site
    return pairs


def _is_send(site: Site) -> bool:
    """Whether an op only sends, and so never blocks."""
    if effects.is_stateful(site.op):  # a loop that also prints, say
        return False
    return all(call.facts.end == "sends" for call in site.calls)


def _data_order(
    sites: Sequence[Site], ops: Sequence[tf.Operation]
) -> list[tuple[Site, Site]]:
    """Returns the pairs (before, after) whose operand depends on an earlier result."""
    index = {site.op: n for n, site in enumerate(sites)}
    above: dict[tf.Operation, int] = {}  # bit n: the op depends on sites[n]
    pairs = []
    for op in ops:
        bits = 0
        for source in walk.waits_for(op):
            bits |= above.get(source, 0)
        n = index.get(op)
        if n is not None:
            pairs += [(sites[k], sites[n]) for k in range(n) if bits >> k & 1]
            # A send yields only a receipt, which rewiring replaces by a constant.
            sends = sites[n].construct == "call" and _is_send(sites[n])
            bits = 0 if sends else bits | 1 << n
        above[op] = bits
    return pairs


def _find_cycle(
    nodes: Sequence[Node], pairs: Sequence[tuple[Site, Site]]
) -> list[tuple[Site, Site]] | None:
    """Returns the links (before, after) of a cycle of nodes, or None."""
    node_of = {id(site): n for n, node in enumerate(nodes) for site in node}
    links: dict[tuple[int, int], tuple[Site, Site]] = {}
    sorter = graphlib.TopologicalSorter[int]()
    for before, after in pairs:
        ends = node_of[id(before)], node_of[id(after)]
        if ends not in links:
            links[ends] = before, after
            sorter.add(ends[1], ends[0])
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        return [links[ends] for ends in itertools.pairwise(error.args[1])]
    return None


def _raise(cycle: Sequence[tuple[Site, Site]]) -> None:
    start = min(range(len(cycle)), key=lambda n: cycle[n][0].replica_id)
    lines = [
        f"{before.site()}\n    must happen before {after}"
        for before, after in [*cycle[start:], *cycle[:start]]
    ]
    raise errors.DeadlockError(
        "the replicas would wait for one another in a cycle:",
        lines,
        "change the order of the calls on one of these replicas: send before "
        "receiving, and make the calls of several groups in the same order on all "
        "replicas.",
    )
