# SPDX-License-Identifier: Apache-2.0
"""Matches local calls with those of replicas that other processes build.

Placeholders describe themselves completely, so each process reports its replicas' calls
and the control flow around each. Every process then matches the calls of all replicas
as if it had built them all, and reaches the same result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import functions
from replicator.cluster.peers import Peers
from replicator.costs import cost
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call, Placeholder
from replicator.graph.matching import factors, gradients, levels, match
from replicator.graph.matching.control_flow import CONSTRUCTS, Region
from replicator.world import World

_SAME_PLACES = (
    "let all replicas communicate inside the same branches, loops and functions."
)
# The number of keys of a collective whose size is only known when the step runs.
DYNAMIC = 31


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """The calls of all replicas, where other processes build some of these.

    Attributes:
        world: All replicas.
        calls: The calls that pair, by key and then by replica.
        first: The first collective key reserved for a call, by the call's key.
        groups: The group key of each group of processes.
        factors: `factors[r]` maps the keys of replica r's calls to those operands that
            can be reduced by exchanging their factors.
    """

    world: World
    calls: Mapping[str, Mapping[int, Call]]
    first: Mapping[str, int]
    groups: Mapping[tuple[int, ...], int]
    factors: Sequence[Mapping[str, Mapping[int, factors.FactorReport]]]

    def by_factors(
        self, call: Call, policy: cost.Policy
    ) -> dict[int, list[int | None]]:
        """Returns the operands of a call that all processes reduce by their factors.

        Args:
            call: An all_reduce.
            policy: The user's choices.

        Returns:
            For the index of each such operand, the number of rows of each participating
            process; None where that is only known when the step runs.
        """
        if not policy.factors or call.options["op"] not in ("sum", "mean"):
            return {}
        reported = [self.factors[r].get(call.key, {}) for r in call.group]
        alike = {
            k: fact
            for k, fact in reported[0].items()
            if all(k in facts and facts[k].alike(fact) for facts in reported)
            and (call.options.get("algorithm") or call.policy(k).algorithm) is None
        }
        products = {
            k: self._counts(call, [facts[k].static_rows for facts in reported])
            for k, fact in alike.items()
            if fact.of is None
            and cost.rows_pay(
                sum(facts[k].rows for facts in reported),
                fact.widths,
                fact.size,
                len(reported),
                policy,
                crosses=True,
            )
        }
        # Sums of rows that move with one of the products anyway.
        return products | {k: [] for k, fact in alike.items() if fact.of in products}

    def _counts(self, call: Call, counts: Sequence[int | None]) -> list[int | None]:
        """Adds up the rows of each process's replicas."""
        total: dict[int, int | None] = dict.fromkeys(self.processes(call.group), 0)
        for r, count in zip(call.group, counts, strict=True):
            process = self.world.processes[r]
            before = total[process]
            total[process] = None if count is None or before is None else before + count
        return list(total.values())

    def offset(self, key: str, depth: int) -> int:
        """Returns how far after a call's first key the keys of its control flow begin.

        Args:
            key: The call's key.
            depth: How many control flow ops enclose the one in question.
        """
        return _numbers(self.calls[key], self.factors) + depth

    def partners(self, call: Call) -> list[Call]:
        """Returns all calls of a call's communication, in replica order."""
        return [self.calls[call.key][r] for r in call.group]

    def processes(self, replica_ids: Sequence[int]) -> tuple[int, ...]:
        """Returns the processes that build some replicas, ascending."""
        return tuple(sorted({self.world.processes[r] for r in replica_ids}))


@dataclasses.dataclass(frozen=True)
class ReplicaReport:
    """What this process reports of one of its replicas.

    Attributes:
        calls: The replica's calls, in order.
        paths: The control flow around each call, by its key.
        levels: Its communicating ops, on each level.
        factors: By call key, the operands that can be reduced by their factors.
        passes: The passes in which it takes gradients.
    """

    calls: list[Call]
    paths: dict[str, str]
    levels: list[levels.LevelReport]
    factors: dict[str, dict[int, factors.FactorReport]]
    passes: gradients.Passes


def report_of(
    sites: Sequence[Placeholder | Region], ops: Sequence[tf.Operation]
) -> ReplicaReport:
    """Collects what this process reports of one replica.

    Args:
        sites: Its communicating ops at the top level.
        ops: All of its ops.
    """
    calls: dict[str, Call] = {}
    paths: dict[str, str] = {}
    for site in sites:
        for call in site.calls:
            calls.setdefault(call.key, call)
        _note_paths(site.op, "", paths)
    operand_factors = {
        site.call.key: factors.reports(site.operands)
        for site in sites
        if isinstance(site, Placeholder) and site.call.facts.reduces_for_all
    }
    own_calls = list(calls.values())
    differentiates = any(call.backward for call in own_calls)
    passes = gradients.passes(ops if differentiates else [])
    return ReplicaReport(
        own_calls, paths, levels.levels_of(sites, ops), operand_factors, passes
    )


def _note_paths(op: Any, path: str, paths: dict[str, str]) -> None:
    """Records the control flow around each call of an op, to any depth."""
    call = placeholder.read(op)
    if call is not None:
        paths.setdefault(call.key, path)
        return
    if not kind_of(op).calls:
        return
    for n, (_, body) in enumerate(functions.called_graphs(op)):
        inside = f"{path}/{CONSTRUCTS.get(op.type, op.type)} {n}"
        for inner in body.get_operations():
            _note_paths(inner, inside, paths)


def check(
    peers: Peers, world: World, local_reports: Sequence[ReplicaReport], what: str
) -> Elsewhere:
    """Raises unless the calls of all replicas pair, whichever process builds them.

    Args:
        peers: The processes.
        world: All replicas.
        local_reports: The report of each local replica.
        what: What is being built, for messages.

    Returns:
        The calls of all replicas.

    Raises:
        MismatchError: They do not pair; all processes raise it.
    """
    report = {
        "next": peers.keys.next,
        "replicas": [
            [
                [placeholder.token_of(c), replica.paths.get(c.key, "")]
                for c in replica.calls
            ]
            for replica in local_reports
        ],
        "levels": [
            [level.stops for level in replica.levels] for replica in local_reports
        ],
        "factors": [replica.factors for replica in local_reports],
        "passes": [dataclasses.asdict(replica.passes) for replica in local_reports],
    }
    reports = peers.exchange(what, report)
    calls: list[list[Call]] = [[] for _ in world.replica_ids]
    passes = [gradients.Passes() for _ in world.replica_ids]
    paths: dict[str, dict[int, str]] = {}
    for process in peers.processes:
        ids = [r for r in world.replica_ids if world.processes[r] == process]
        for r, fields in zip(ids, reports[process]["passes"], strict=True):
            passes[r] = gradients.Passes(**fields)
        for r, tokens in zip(ids, reports[process]["replicas"], strict=True):
            for token, path in tokens:
                call = placeholder.call_of(token.encode())
                assert call is not None, "placeholders describe themselves"
                calls[r].append(call)
                paths.setdefault(call.key, {})[r] = path
    match.check(calls, passes=passes)
    partners: dict[str, dict[int, Call]] = {}
    for r, replica_calls in enumerate(calls):
        for call in replica_calls:
            partners.setdefault(call.key, {})[r] = call
    _check_paths(partners, paths)
    reported = [report["levels"] for report in reports]
    levels.check(
        peers, world, [replica.levels for replica in local_reports], reported, calls
    )
    depths = {
        key: next(iter(by_replica.values())).count("/")
        for key, by_replica in paths.items()
    }
    first = max(report["next"] for report in reports)
    return _numbered(
        peers, world, partners, depths, first, _all_factors(world, reports)
    )


def _all_factors(
    world: World, reports: Sequence[Any]
) -> list[dict[str, dict[int, factors.FactorReport]]]:
    """Returns the operands of all replicas that can be reduced by their factors."""
    iterators = [iter(report["factors"]) for report in reports]
    return [
        {
            key: {
                int(k): factors.FactorReport(*of_operand)
                for k, of_operand in of_call.items()
            }
            for key, of_call in next(iterators[process]).items()
        }
        for process in world.processes
    ]


def _check_paths(
    calls_by_key: Mapping[str, Mapping[int, Call]],
    paths: Mapping[str, Mapping[int, str]],
) -> None:
    for key, calls in calls_by_key.items():
        first, *others = calls
        for r in others:
            if paths[key][r] != paths[key][first]:
                texts = [_place_text(paths[key][replica]) for replica in (first, r)]
                if texts[0] == texts[1]:  # in another branch, say
                    texts = [f"in {paths[key][replica][1:]}" for replica in (first, r)]
                raise errors.MismatchError(
                    "the replicas communicate at different places in the control flow: "
                    f"{texts[0]} on replica {first}, {texts[1]} on replica {r}.",
                    [calls[first].site(), calls[r].site()],
                    _SAME_PLACES,
                )


def _place_text(path: str) -> str:
    inside = path.rpartition("/")[2].rpartition(" ")[0]
    return f"inside a {inside}" if inside else "at the top level"


def _numbered(
    peers: Peers,
    world: World,
    calls_by_key: Mapping[str, Mapping[int, Call]],
    depths: Mapping[str, int],
    first: int,
    factors_by_replica: Sequence[Mapping[str, Mapping[int, factors.FactorReport]]],
) -> Elsewhere:
    """Reserves keys, the same in all processes, for each call that crosses processes.

    Args:
        peers: The processes.
        world: All replicas.
        calls_by_key: The calls that pair, by key and then by replica.
        depths: How many control flow ops enclose each call.
        first: A key that no process has used yet.
        factors_by_replica: As `Elsewhere.factors`.
    """
    count, firsts = 0, {}
    everyone = tuple(peers.processes)
    groups = {everyone: peers.keys.group(everyone)}
    for key in sorted(calls_by_key):
        calls = calls_by_key[key]
        processes = tuple(sorted({world.processes[r] for r in calls}))
        if len(processes) > 1:
            firsts[key] = count
            count += _numbers(calls, factors_by_replica) + depths[key] + 1
            groups[processes] = peers.keys.group(processes)
    base = peers.keys.take(first, count)
    numbers = {key: base + number for key, number in firsts.items()}
    return Elsewhere(world, calls_by_key, numbers, groups, factors_by_replica)


def _numbers(
    calls: Mapping[int, Call],
    factors_by_replica: Sequence[Mapping[str, Mapping[int, Any]]],
) -> int:
    """Returns a bound on the keys of a call: two factors per operand, and one more."""
    operands = max(len(call.operands) for call in calls.values())
    values = [value for call in calls.values() for value in call.operands]
    rows = [
        facts.static_rows
        for r, call in calls.items()
        for facts in factors_by_replica[r].get(call.key, {}).values()
    ]
    static = all(
        value.shape is not None and None not in value.shape for value in values
    )
    return (2 * operands + 1) * (1 if static and None not in rows else 1 + DYNAMIC)
