# SPDX-License-Identifier: Apache-2.0
"""Finds cycles of replicas that wait for one another across processes, on every level.

In one process, deadlock.py checks each level of a step while it is rewritten. A process
rewrites only its own replicas, so the processes report the communicating ops of all
levels: of the step itself, and of every conditional, loop and function with
communication inside.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import functions
from replicator.cluster.peers import Peers
from replicator.graph.ir.placeholder import Call, Placeholder
from replicator.graph.matching import control_flow, deadlock, match
from replicator.graph.matching.control_flow import Region
from replicator.world import World


@dataclasses.dataclass(frozen=True)
class LevelReport:
    """One level of a replica of this process.

    Attributes:
        stops: The communicating ops: the construct, the keys of its calls, its line in
            messages, and the numbers of the levels of its functions.
        waits: Returns which of these ops must wait for which, by index.
    """

    stops: list[tuple[str, list[str], str, list[int]]]
    waits: Callable[[], list[tuple[int, int]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Stop:
    """A communicating op, built by any process.

    Attributes:
        construct: The kind of op: a call, a conditional, a loop or a function.
        replica_id: The replica that built it.
        calls: All calls of the op, including those inside its functions.
        text: Its description in messages.
        bodies: The numbers of the levels of its functions.
        op: Always None: the op may exist in another process only.
    """

    construct: str
    replica_id: int
    calls: tuple[Call, ...]
    text: str
    bodies: Sequence[int] = ()
    op: Any = None

    def site(self) -> str:
        """Returns the error message line that locates the op."""
        return self.text

    def __str__(self) -> str:
        return self.text


# The communicating ops of each level of each replica.
Stops = Sequence[Sequence[Sequence[Stop]]]
# Ops that are merged, and the (replica, level) pairs that they are on.
Paired = tuple[list[tuple[Stop, ...]], list[tuple[int, int]]]


def levels_of(
    sites: Sequence[Placeholder | Region], ops: Sequence[tf.Operation]
) -> list[LevelReport]:
    """Collects the levels of one replica, of which the first is the step itself.

    Args:
        sites: Its communicating ops on the first level.
        ops: All of its ops there.
    """
    levels: list[LevelReport] = []
    _collect(sites, ops, levels)
    return levels


def _collect(
    sites: Sequence[Placeholder | Region],
    ops: Sequence[tf.Operation],
    levels: list[LevelReport],
) -> int:
    """Adds a level and those inside; returns its number."""
    number = len(levels)
    stops: list[tuple[str, list[str], str, list[int]]] = []
    levels.append(LevelReport(stops, functools.partial(deadlock.waits, sites, ops)))
    for site in sites:
        bodies = []
        for _, body in (
            functions.called_graphs(site.op) if isinstance(site, Region) else ()
        ):
            inner = body.get_operations()
            inner_sites = control_flow.find_sites(inner, site.replica_id)
            bodies.append(_collect(inner_sites, inner, levels))
        keys = [call.key for call in site.calls]
        stops.append((site.construct, keys, site.site(), bodies))
    return number


def check(
    peers: Peers,
    world: World,
    local_levels: Sequence[Sequence[LevelReport]],
    reports: Sequence[Any],
    calls: Sequence[Sequence[Call]],
) -> None:
    """Raises if replicas wait for one another in a cycle, on any level and host.

    Args:
        peers: The processes.
        world: All replicas.
        local_levels: The levels of each local replica.
        reports: For each process, the stops of its replicas' levels, as JSON.
        calls: The calls of each replica.

    Raises:
        MismatchError: The replicas communicate inside different control flow.
        DeadlockError: There is a cycle; all processes raise it.
    """
    stops = _all_stops(world, reports, calls)
    all_calls = [call for replica in calls for call in replica]
    circular = [
        (nodes, places)
        for nodes, places in _paired(
            stops, dict.fromkeys(world.replica_ids, 0), all_calls
        )
        if not deadlock.one_order(nodes, [stops[r][n] for r, n in places])
    ]
    if not circular:
        return  # nearly always
    needed = {place for _, places in circular for place in places}
    waits: dict[str, list[list[int]]] = {}
    for answer in peers.exchange(
        "orders its communication",
        {
            f"{r}/{n}": level.waits()
            for r, levels in zip(world.local, local_levels, strict=True)
            for n, level in enumerate(levels)
            if (r, n) in needed
        },
    ):
        waits.update(answer)
    for nodes, places in circular:
        pairs = [
            (stops[r][n][before], stops[r][n][after])
            for r, n in places
            for before, after in waits[f"{r}/{n}"]
        ]
        deadlock.refuse(nodes, pairs)


def _all_stops(
    world: World, reports: Sequence[Any], calls: Sequence[Sequence[Call]]
) -> Stops:
    """Returns the communicating ops of all replicas, from the processes' reports."""
    iterators = [iter(report) for report in reports]
    stops = []
    for r, process in enumerate(world.processes):
        by_key = {call.key: call for call in calls[r]}
        stops.append(
            [
                [
                    Stop(construct, r, tuple(map(by_key.__getitem__, keys)), *rest)
                    for construct, keys, *rest in level
                ]
                for level in next(iterators[process])
            ]
        )
    return stops


def _paired(
    stops: Stops, places: Mapping[int, int], calls: Sequence[Call]
) -> Iterator[Paired]:
    """Yields the groups of ops that are merged, on a level and on those inside.

    Args:
        stops: The communicating ops of each level of each replica.
        places: The number of the level, for each replica that takes part.
        calls: All calls of the step, for messages.
    """
    nodes = match.pair([stops[r][n] for r, n in places.items()], calls=calls)
    yield nodes, [*places.items()]
    for node in nodes:
        for bodies in zip(*(stop.bodies for stop in node), strict=False):
            inside = zip(node, bodies, strict=True)
            inner = {stop.replica_id: n for stop, n in inside}
            yield from _paired(stops, inner, calls)
