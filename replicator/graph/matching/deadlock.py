# SPDX-License-Identifier: Apache-2.0
"""Finds replicas that would wait for one another in a circle, before anything runs.

The communication that a replica's own code asks for happens in program order, as in
torch.distributed and MPI: what is behind a collective or a recv waits for it; a
send waits for nobody. Gradients are built in an order that the user does not choose, so
there only what a value is computed from comes before it.

Runs per level of the graph, once the ops that become one are known; changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf, errors
from replicator.graph.matching.match import Site

Node = tuple[Site, ...]  # the ops that become one


def check(
    nodes: Sequence[Node],
    sites: Sequence[Sequence[Site]],
    replicas: Sequence[Sequence[tf.Operation]],
) -> None:
    """Raises unless the communication of one level can happen in some order.

    Args:
        nodes: The sets of ops that become one.
        sites: `sites[n]` are the ops of one replica that communicate, in order.
        replicas: `replicas[n]` are all ops of that replica on this level, in order.

    Raises:
        DeadlockError: It cannot; the message lists the circle.
    """
    if one_order(nodes, sites):
        return  # which is nearly always so
    pairs = [
        (own[one], own[two])
        for own, ops in zip(sites, replicas, strict=True)
        for one, two in waits(own, ops)
    ]
    refuse(nodes, pairs)


def one_order(nodes: Sequence[Node], sites: Sequence[Sequence[Site]]) -> bool:
    """Whether one order of the communication suits all replicas.

    Args:
        nodes: The sets of ops that become one.
        sites: `sites[n]` are the ops of one replica that communicate, in order.
    """
    in_order = [
        (one, two) for own in sites for one, two in zip(own, own[1:], strict=False)
    ]
    return _find_circle(nodes, in_order) is None


def waits(sites: Sequence[Site], ops: Sequence[tf.Operation]) -> list[tuple[int, int]]:
    """Returns which of a replica's ops that communicate have to wait for which.

    Args:
        sites: Those ops, in order.
        ops: All ops of the replica on this level, in order.

    Returns:
        (before, after), by their places.
    """
    place = {id(site): n for n, site in enumerate(sites)}
    pairs = [*_program_order(sites), *_data_order(sites, ops)]
    return [(place[id(one)], place[id(two)]) for one, two in pairs]


def refuse(nodes: Sequence[Node], pairs: Sequence[tuple[Site, Site]]) -> None:
    """Raises DeadlockError if there is a circle.

    Args:
        nodes: The sets of ops that become one.
        pairs: (before, after), of all replicas.
    """
    circle = _find_circle(nodes, pairs)
    if circle is not None:
        _raise(circle)


def _program_order(sites: Sequence[Site]) -> list[tuple[Site, Site]]:
    """Returns (before, after) for what a replica's own code puts in order."""
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
    """Whether an op hands messages out and waits for nobody."""
    if _tf.is_stateful(site.op):  # a loop that also prints, say
        return False
    return all(call.facts.end == "sends" for call in site.calls)


def _data_order(
    sites: Sequence[Site], ops: Sequence[tf.Operation]
) -> list[tuple[Site, Site]]:
    """Returns (before, after) where an operand is computed from a result."""
    index = {site.op: n for n, site in enumerate(sites)}
    above: dict[tf.Operation, int] = {}  # a bit for each site that comes before an op
    pairs = []
    for op in ops:
        bits = 0
        for source in [t.op for t in op.inputs] + list(op.control_inputs):
            bits |= above.get(source, 0)
        n = index.get(op)
        if n is not None:
            pairs += [(sites[k], sites[n]) for k in range(n) if bits >> k & 1]
            # All that comes of a send is a receipt, a constant once it is rewired.
            sends = sites[n].construct == "call" and _is_send(sites[n])
            bits = 0 if sends else bits | 1 << n
        above[op] = bits
    return pairs


def _find_circle(
    nodes: Sequence[Node], pairs: Sequence[tuple[Site, Site]]
) -> list[tuple[Site, Site]] | None:
    """Returns links (before, after) that lead from a node back to it, or None."""
    node_of = {id(site): n for n, node in enumerate(nodes) for site in node}
    count = len(nodes)
    after: list[list[tuple[Site, Site]]] = [[] for _ in range(count)]
    for one, two in pairs:
        after[node_of[id(one)]].append((one, two))
    state = [0] * count  # 0: not seen, 1: on the path, 2: done
    for start in range(count):
        if state[start]:
            continue
        path: list[tuple[Site, Site]] = []
        stack = [(start, iter(after[start]))]
        state[start] = 1
        while stack:
            node, links = stack[-1]
            link = next(links, None)
            if link is None:
                state[node] = 2
                stack.pop()
                if path:
                    path.pop()
                continue
            target = node_of[id(link[1])]
            if state[target] == 1:
                path.append(link)
                begin = [n for n, _ in stack].index(target)
                return path[begin:]
            if state[target] == 0:
                state[target] = 1
                path.append(link)
                stack.append((target, iter(after[target])))
    return None


def _raise(circle: Sequence[tuple[Site, Site]]) -> None:
    start = min(range(len(circle)), key=lambda n: circle[n][0].replica_id)
    lines = [
        f"{before.site()}\n    has to happen before {after}"
        for before, after in [*circle[start:], *circle[:start]]
    ]
    raise errors.DeadlockError(
        errors.compose(
            "the replicas would wait for one another in a circle:",
            lines,
            "change the order of the calls on one of these replicas: let it send "
            "before it receives, and let all replicas make the calls of several groups "
            "in the same order.",
        )
    )
