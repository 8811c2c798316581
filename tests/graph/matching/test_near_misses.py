# SPDX-License-Identifier: Apache-2.0
"""Errors for calls without a partner name the likely intended ones."""

from __future__ import annotations

import pytest

from replicator.graph.ir.placeholder import Call
from tests.graph.matching.test_match import call, refused


def _end(primitive: str, replica: int, source: int, destination: int, tag: int) -> Call:
    """One end of a message, with its address in the options as well."""
    options = {"source": source, "destination": destination, "tag": tag}
    key = f"{source}>{destination}#{tag}:0"
    group = tuple(sorted((source, destination)))
    line = f"{primitive}.py:{replica} in step_fn"
    return call(key, replica, primitive, options, group=group, line=line)


def _sent_and(*received: Call) -> list[list[Call]]:
    """Replica 0 sends to replica 1 with tag 7; the others receive."""
    sent = [_end("send", 0, 0, 1, 7)]
    return [sent, *([c for c in received if c.replica_id == r] for r in (1, 2))]


_MESSAGE = (
    r"^Message 0 from 0 to 1, tag 7, .* no partner.*replica 1: 0 calls\n"
    r"  with a different {said}: replica {r} .*: recv source={source} "
    r".* at recv\.py:{r} in step_fn\nFix: .*the same {said};.*the source send"
)
_GROUPS = (
    r"call 0 of group \[0, 1\] of replica 0 .*replica 1: 0 calls\n"
    r"  with a different group: replica 1 .*group=\[1, 2\].* at train\.py:4 in "
    r"step_fn\nFix: .*the same group; otherwise, let every replica"
)
_KIND = (
    r"of group \[0, 1\] of replica 0 has no partner.*train.py:4.*"
    r"replica 1: 0 calls, but all_gather .*at train.py:1 in step_fn\nFix"
)


def _of_groups(paired: bool) -> list[list[Call]]:
    """Even if replica 1's call has partners, when all of them are on one line."""
    first = [call("0,1:0", 0, group=(0, 1))]
    others = [[call("1,2:0", r, group=(1, 2))] for r in (1, 2)]
    return [first, others[0], others[1] if paired else []]


def _of_kinds(group: tuple[int, ...]) -> list[list[Call]]:
    first = call("0,1:0", 0, group=(0, 1))
    return [
        [first],
        *(
            [call("0", r, "all_gather", {}, (), f"train.py:{r} in step_fn", group)]
            for r in (1, 2)
        ),
    ]


NEAR: dict[str, tuple[list[list[Call]], str]] = {
    "tag": (
        _sent_and(_end("recv", 1, 0, 1, 8)),
        _MESSAGE.format(said="tag", r=1, source=0),
    ),
    "source": (
        _sent_and(_end("recv", 1, 2, 1, 7)),
        _MESSAGE.format(said="source", r=1, source=2),
    ),
    "destination": (
        _sent_and(_end("recv", 2, 0, 2, 7)),
        _MESSAGE.format(said="destination", r=2, source=0),
    ),
    "source and tag": (
        _sent_and(_end("recv", 1, 2, 1, 8)),
        _MESSAGE.format(said="source and tag", r=1, source=2),
    ),
    # Of many, the three that differ in the least.
    "many": (
        _sent_and(
            *(_end("recv", 1, 2, 1, tag) for tag in range(5)), _end("recv", 1, 0, 1, 9)
        ),
        r"\A((?!different).)*different tag:((?!different).)*different source and tag:"
        r"((?!different).)*different source and tag:((?!different).)*\Z",
    ),
    "group": (_of_groups(False), _GROUPS),
    "group of others on the line": (_of_groups(True), _GROUPS),
    "kind": (_of_kinds((0, 1, 2)), _KIND),
    "kind and group": (_of_kinds((1, 2)), _KIND),
}


@pytest.mark.parametrize("what", NEAR)
def test_what_was_likely_meant_is_named(what: str) -> None:
    calls, pattern = NEAR[what]
    refused(what, pattern, calls)


def test_messages_of_others_are_no_near_misses() -> None:
    far = _end("recv", 2, 1, 2, 5)  # shares only a part of its address
    refused("far", "^Message 0", _sent_and(far), lacks="different")
