# SPDX-License-Identifier: Apache-2.0
"""Finds calls that were perhaps meant to pair but differ in address or along an axis.

Used for error messages only: a call without a partner often has one under another tag,
in another group or on another replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from replicator.graph.ir.placeholder import Call

_NEAR = 3  # the most that are listed


def find(
    calls: Sequence[Sequence[Call]], extra: Call, unmatched: Sequence[Call]
) -> list[tuple[tuple[str, ...], Call]]:
    """Returns the calls that were perhaps meant to pair with one without a partner.

    Args:
        calls: All calls of all replicas.
        extra: The call without a partner.
        unmatched: All calls without partners.

    Returns:
        (differences, call), fewest differences first: of other calls without partners,
        or if none qualifies, of calls on the line of `extra`.
    """
    if extra.backward:
        return []
    here = [c for replica_calls in calls for c in replica_calls if c.line == extra.line]
    for candidates in (unmatched, here):
        compared = [(_differs_in(extra, c), c) for c in candidates]
        near = [(differences, c) for differences, c in compared if differences]
        if near:
            return sorted(near, key=lambda entry: len(entry[0]))[:_NEAR]
    return []


def by_replica(
    calls: Sequence[Sequence[Call]],
    extra: Call,
    unmatched: Sequence[Call],
    near: Sequence[tuple[tuple[str, ...], Call]],
) -> list[str]:
    """Lists how many calls each replica of a group makes, and where.

    Args:
        calls: All calls of all replicas.
        extra: The call of this group without a partner.
        unmatched: All calls without partners.
        near: The result of `find`.
    """
    listed = {call.replica_id for _, call in near}
    lines = []
    for r in extra.group:
        same = [c for c in calls[r] if c.channel == extra.channel]
        others = [c for c in unmatched if c.replica_id == r] or calls[r]
        text = ""
        if same:
            text = f", the last one: {same[-1]}"
        elif others and r not in listed:
            text = f", but {others[0]}"
        number = "1 call" if len(same) == 1 else f"{len(same)} calls"
        lines.append(f"replica {r}: {number}{text}")
    return lines


def axis(first: Call, other: Call) -> str:
    """Suggests the axis along which the calls would pair, if there is one."""
    if not first.facts.joins or {**first.options, **other.options}["axis"] is not None:
        return ""
    axes = set()
    for first_value, other_value in zip(first.operands, other.operands, strict=False):
        if (
            first_value.shape is None
            or other_value.shape is None
            or len(first_value.shape) != len(other_value.shape)
        ):
            return ""
        sizes = enumerate(zip(first_value.shape, other_value.shape, strict=True))
        axes |= {k for k, (a, b) in sizes if None not in (a, b) and a != b}
    if len(axes) != 1:
        return ""
    return f"pass axis={axes.pop()}, along which sizes may differ; or "


def _differs_in(extra: Call, call: Call) -> tuple[str, ...]:
    """Names the differences of a call from a partner of `extra`, if only in address."""
    if (
        call.pairs_as != extra.pairs_as
        or call.channel == extra.channel
        or call.backward
    ):
        return ()
    if call.replica_id == extra.replica_id:
        return ()
    if extra.pairs_as != "message":
        return ("group",) if call.replica_id in extra.group else ()
    if call.primitive == extra.primitive:
        return ("direction",) if call.group == extra.group else ()
    names = ("source", "destination", "tag")
    differs = tuple(n for n in names if call.options.get(n) != extra.options.get(n))
    return differs if len(differs) == 1 or call.replica_id in extra.group else ()
