# SPDX-License-Identifier: Apache-2.0
"""Finds replicas that take the gradients of one call in different orders.

Gradients of a call are paired by their number: the n-th that one replica takes with the
n-th of the others. If two losses depend on the call and replicas differentiate them in
another order, the gradient of one loss would be added to that of the other. Lines tell:
a gradient that pairs with one of another line, where its replica has a gradient of its
own too, is out of order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from replicator.graph.ir.placeholder import Call


def out_of_order(
    calls: Sequence[Sequence[Call]], partners: Iterable[Mapping[int, Call]]
) -> tuple[Call, Call] | None:
    """Returns two calls in gradients that pair, but belong to different losses, if any.

    Args:
        calls: All calls of all replicas.
        partners: The calls that pair, by replica.
    """
    lines: dict[tuple[int, str], set[str]] = {}
    for replica_calls in calls:
        for call in replica_calls:
            if call.backward:
                lines.setdefault((call.replica_id, _forward(call)), set()).add(
                    call.line
                )
    for members in partners:
        first, *others = members.values()
        for other in others if first.backward else ():
            if first.line == other.line:
                continue
            if (
                first.line in lines[other.replica_id, _forward(other)]
                or other.line in lines[first.replica_id, _forward(first)]
            ):
                return first, other
    return None


def _forward(call: Call) -> str:
    """Returns the key of the call that one in a gradient differentiates."""
    return call.key.rpartition("/")[0]
