# SPDX-License-Identifier: Apache-2.0
"""Finds calls that may have been meant to pair, but are addressed otherwise.

For messages of errors only: a call without a partner often has one under another tag,
in another group, or on another replica.
"""

from __future__ import annotations

from collections.abc import Sequence

from replicator.graph.ir.placeholder import Call

_NEAR = 3  # so many are listed


def find(
    calls: Sequence[Sequence[Call]], extra: Call, alone: Sequence[Call]
) -> list[tuple[tuple[str, ...], Call]]:
    """Returns calls that may have been meant to be partners of one that has none.

    Args:
        calls: All calls of all replicas.
        extra: The call without a partner.
        alone: All calls without partners.

    Returns:
        (in what it differs, the call), those first that differ in the least: calls
        that have no partners either, or else calls on the line of `extra`.
    """
    if extra.backward:
        return []
    here = [c for own in calls for c in own if c.line == extra.line]
    for candidates in (alone, here):
        found = [(_differs_in(extra, c), c) for c in candidates]
        near = [(how, c) for how, c in found if how]
        if near:
            return sorted(near, key=lambda entry: len(entry[0]))[:_NEAR]
    return []


def _differs_in(extra: Call, call: Call) -> tuple[str, ...]:
    """Says in what a call differs from a partner of `extra`, if in its address only."""
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
