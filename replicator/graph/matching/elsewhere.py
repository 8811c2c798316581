# SPDX-License-Identifier: Apache-2.0
"""What replicas call that other processes build, as these processes tell it.

Placeholders describe themselves completely, so what a process tells of its replicas are
their calls, with the control flow that each is in. With those of all replicas, calls
are matched as if all had been built here, and every process comes to the same result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.cluster.peers import Peers
from replicator.costs import cost
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call, Placeholder
from replicator.graph.matching import deadlock, factors, match
from replicator.graph.matching.control_flow import CONSTRUCTS, Region
from replicator.world import World

_SAME_PLACES = (
    "let all replicas communicate inside the same branches, loops and functions."
)
# How many numbers a collective takes whose size is only known when the step runs.
DYNAMIC = 31


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """The calls of all replicas, if other processes build some of them.

    Attributes:
        world: All replicas.
        calls: By their keys, the calls that belong together, by replica.
        first: By the key of a call, the first of its numbers for collectives.
        groups: The keys of groups of processes, by their numbers.
        factors: `factors[r]` are, by the keys of replica r's calls, those operands that
            can be moved by their factors.
    """

    world: World
    calls: Mapping[str, Mapping[int, Call]]
    first: Mapping[str, int]
    groups: Mapping[tuple[int, ...], int]
    factors: Sequence[Mapping[str, Mapping[int, factors.Facts]]]

    def by_factors(
        self, call: Call, policy: cost.Policy
    ) -> dict[int, list[int | None]]:
        """Returns which operands of a call all processes move by their factors.

        Args:
            call: An all_reduce.
            policy: What the user says.

        Returns:
            By the place of the operand, how many rows each process has, of those that
            take part; None where that is only known when the step runs.
        """
        if not policy.factors or call.options["op"] not in ("sum", "mean"):
            return {}
        told = [self.factors[r].get(call.key, {}) for r in call.group]
        alike = {
            k: one
            for k, one in told[0].items()
            if all(k in own and own[k].alike(one) for own in told)
            and (call.options.get("algorithm") or call.policy(k).algorithm) is None
        }
        made = {
            k: self._counts(call, [own[k].known for own in told])
            for k, one in alike.items()
            if one.of is None
            and cost.rows_pay(
                sum(own[k].rows for own in told),
                *(one.widths, one.size, len(told), policy),
                crosses=True,
            )
        }
        # The rows of these move anyway.
        return made | {k: [] for k, one in alike.items() if one.of in made}

    def _counts(self, call: Call, counts: Sequence[int | None]) -> list[int | None]:
        """Adds up, for each process, how many rows its replicas have."""
        total: dict[int, int | None] = dict.fromkeys(self.processes(call.group), 0)
        for r, count in zip(call.group, counts, strict=True):
            process = self.world.processes[r]
            before = total[process]
            total[process] = None if count is None or before is None else before + count
        return list(total.values())

    def offset(self, key: str, depth: int) -> int:
        """Returns how far behind the first number those of control flow begin.

        Args:
            key: That of a call.
            depth: How much control flow is around that which is around the call.
        """
        return _numbers(self.calls[key], self.factors) + depth

    def partners(self, call: Call) -> list[Call]:
        """Returns the calls that belong together with one, in replica order."""
        return [self.calls[call.key][r] for r in call.group]

    def processes(self, replica_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the processes that build some replicas, ascending."""
        return tuple(sorted({self.world.processes[r] for r in replica_ids}))


@dataclasses.dataclass(frozen=True, eq=False)
class Stop:
    """An op that communicates on the outermost level, of any process.

    Attributes:
        construct: What it is: a call, or which control flow.
        replica_id: Whose it is.
        calls: All calls of the op, inside it too.
        text: What it is called in messages.
        op: There is none here.
    """

    construct: str
    replica_id: int
    calls: tuple[Call, ...]
    text: str
    op: Any = None

    def site(self) -> str:
        """Returns the line of an error message that says where it is."""
        return self.text

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True)
class Own:
    """What this process tells of one of its replicas.

    Attributes:
        calls: Its calls, in order.
        paths: By the key of each, the control flow that it is in.
        stops: Its ops that communicate: what each is, the keys of its calls, and its
            line for messages.
        waits: Returns which of these have to wait for which, by their places.
        factors: By the keys of its calls, what can be moved by its factors.
    """

    calls: list[Call]
    paths: dict[str, str]
    stops: list[tuple[str, list[str], str]]
    waits: Callable[[], list[tuple[int, int]]]
    factors: dict[str, dict[int, factors.Facts]]


def own(sites: Sequence[Placeholder | Region], ops: Sequence[tf.Operation]) -> Own:
    """Returns what is told of a replica.

    Args:
        sites: Its ops that communicate, on the outermost level.
        ops: All of its ops.
    """
    calls: dict[str, Call] = {}
    paths: dict[str, str] = {}
    for site in sites:
        for call in site.calls:
            calls.setdefault(call.key, call)
        _note_paths(site.op, "", paths)
    stops = [
        (site.construct, [call.key for call in site.calls], site.site())
        for site in sites
    ]
    waits = functools.partial(deadlock.waits, sites, ops)
    found = {
        site.call.key: factors.facts(site.operands)
        for site in sites
        if isinstance(site, Placeholder) and site.call.facts.reduces_for_all
    }
    return Own(list(calls.values()), paths, stops, waits, found)


def _note_paths(op: Any, path: str, paths: dict[str, str]) -> None:
    """Notes where the calls of an op are, to any depth."""
    call = placeholder.read(op)
    if call is not None:
        paths.setdefault(call.key, path)
        return
    if not kind_of(op).calls:
        return
    for n, (_, body) in enumerate(_tf.called_graphs(op)):
        inside = f"{path}/{CONSTRUCTS.get(op.type, op.type)} {n}"
        for inner in body.get_operations():
            _note_paths(inner, inside, paths)


def check(peers: Peers, world: World, told: Sequence[Own], what: str) -> Elsewhere:
    """Raises unless the calls of all replicas pair, wherever they are built.

    Args:
        peers: The processes.
        world: All replicas.
        told: What there is to tell of each local replica.
        what: What is built.

    Returns:
        The calls of all.

    Raises:
        MismatchError: They do not; all processes raise it.
    """
    said = {
        "next": peers.keys.next,
        "replicas": [
            [[placeholder.token_of(c), one.paths.get(c.key, "")] for c in one.calls]
            for one in told
        ],
        "stops": [one.stops for one in told],
        "factors": [one.factors for one in told],
    }
    heard = peers.exchange(what, said)
    calls: list[list[Call]] = [[] for _ in world.everyone]
    paths: dict[str, dict[int, str]] = {}
    for process in peers.everyone:
        ids = [r for r in world.everyone if world.processes[r] == process]
        for r, listed in zip(ids, heard[process]["replicas"], strict=True):
            for token, path in listed:
                call = placeholder.call_of(token.encode())
                assert call is not None, "placeholders describe themselves"
                calls[r].append(call)
                paths.setdefault(call.key, {})[r] = path
    match.check(calls)
    together: dict[str, dict[int, Call]] = {}
    for r, made in enumerate(calls):
        for call in made:
            together.setdefault(call.key, {})[r] = call
    _check_paths(together, paths)
    stops = _all_stops(world, heard, calls)
    nodes = match.pair(stops)
    if not deadlock.one_order(nodes, stops):
        _check_circles(peers, world, told, stops, nodes)
    depths = {key: next(iter(own.values())).count("/") for key, own in paths.items()}
    first = max(one["next"] for one in heard)
    return _numbered(peers, world, together, depths, first, _all_factors(world, heard))


def _all_stops(
    world: World, heard: Sequence[Any], calls: Sequence[Sequence[Call]]
) -> list[list[Stop]]:
    """Returns the ops that communicate, of all replicas, by what was told of them."""
    stops: list[list[Stop]] = []
    waiting = [iter(one["stops"]) for one in heard]
    for r, process in enumerate(world.processes):
        by_key = {call.key: call for call in calls[r]}
        stops.append(
            [
                Stop(construct, r, tuple(by_key[key] for key in keys), text)
                for construct, keys, text in next(waiting[process])
            ]
        )
    return stops


def _all_factors(
    world: World, heard: Sequence[Any]
) -> list[dict[str, dict[int, factors.Facts]]]:
    """Returns what can be moved by its factors, of all replicas."""
    waiting = [iter(one["factors"]) for one in heard]
    return [
        {
            key: {int(k): factors.Facts(*of_operand) for k, of_operand in found.items()}
            for key, found in next(waiting[process]).items()
        }
        for process in world.processes
    ]


def _check_circles(
    peers: Peers,
    world: World,
    told: Sequence[Own],
    stops: Sequence[Sequence[Stop]],
    nodes: Sequence[tuple[Stop, ...]],
) -> None:
    """Raises if replicas wait for one another in a circle, on whichever hosts."""
    heard = peers.exchange("orders its communication", [one.waits() for one in told])
    waiting = [iter(one) for one in heard]
    pairs = [
        (stops[r][before], stops[r][after])
        for r, process in enumerate(world.processes)
        for before, after in next(waiting[process])
    ]
    deadlock.refuse(nodes, pairs)


def _check_paths(
    together: Mapping[str, Mapping[int, Call]], paths: Mapping[str, Mapping[int, str]]
) -> None:
    for key, calls in together.items():
        first, *others = calls
        for r in others:
            if paths[key][r] != paths[key][first]:
                raise errors.MismatchError(
                    errors.compose(
                        "the replicas communicate at different places of the control "
                        f"flow: {_shown(paths[key][first])} on replica {first}, "
                        f"{_shown(paths[key][r])} on replica {r}.",
                        [calls[first].site(), calls[r].site()],
                        _SAME_PLACES,
                    )
                )


def _shown(path: str) -> str:
    inside = path.rpartition("/")[2].rpartition(" ")[0]
    return f"inside a {inside}" if inside else "at the top level"


def _numbered(
    peers: Peers,
    world: World,
    together: Mapping[str, Mapping[int, Call]],
    depths: Mapping[str, int],
    first: int,
    found: Sequence[Mapping[str, Mapping[int, factors.Facts]]],
) -> Elsewhere:
    """Gives each call that crosses processes numbers, alike in all of them.

    Args:
        peers: The processes.
        world: All replicas.
        together: By their keys, the calls that belong together.
        depths: In how much control flow they are.
        first: A number that no process has used.
        found: As `Elsewhere.factors`.
    """
    count, firsts = 0, {}
    everyone = tuple(peers.everyone)
    groups = {everyone: peers.keys.group(everyone)}
    for key in sorted(together):
        calls = together[key]
        processes = tuple(sorted({world.processes[r] for r in calls}))
        if len(processes) > 1:
            firsts[key] = count
            count += _numbers(calls, found) + depths[key] + 1
            groups[processes] = peers.keys.group(processes)
    base = peers.keys.take(first, count)
    numbers = {key: base + number for key, number in firsts.items()}
    return Elsewhere(world, together, numbers, groups, found)


def _numbers(
    calls: Mapping[int, Call], found: Sequence[Mapping[str, Mapping[int, Any]]]
) -> int:
    """Returns how many numbers what is passed takes at most: two factors of each."""
    operands = max(len(call.operands) for call in calls.values())
    values = [value for call in calls.values() for value in call.operands]
    rows = [
        one.known
        for r, call in calls.items()
        for one in found[r].get(call.key, {}).values()
    ]
    known = all(value.shape is not None and None not in value.shape for value in values)
    return (2 * operands + 1) * (1 if known and None not in rows else 1 + DYNAMIC)
