# SPDX-License-Identifier: Apache-2.0
"""Errors for calls without a partner name the likely intended ones."""

from __future__ import annotations

import pytest

from replicator import errors
from replicator.graph.ir.placeholder import Call
from replicator.graph.matching import match
from tests.graph.matching.test_match import call


def _addressed(
    primitive: str, replica: int, source: int, destination: int, tag: int
) -> Call:
    """One end of a message, with its address in the options as well."""
    options = {"source": source, "destination": destination, "tag": tag}
    key = f"{source}>{destination}#{tag}:0"
    group = tuple(sorted((source, destination)))
    line = f"{primitive}.py:{replica} in step_fn"
    return call(key, replica, primitive, options, group=group, line=line)


ADDRESSES = {
    "tag": ((0, 1, 7), (1, 0, 1, 8), "tag"),
    "source": ((0, 1, 7), (1, 2, 1, 7), "source"),
    "destination": ((0, 1, 7), (2, 0, 2, 7), "destination"),
    "source and tag": ((0, 1, 7), (1, 2, 1, 8), "source and tag"),
}


@pytest.mark.parametrize("what", ADDRESSES)
def test_a_message_with_another_address_is_named(what: str) -> None:
    sent, (replica, *received), said = ADDRESSES[what]
    calls: list[list[Call]] = [[_addressed("send", 0, *sent)], [], []]
    calls[replica].append(_addressed("recv", replica, *received))
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)^Message 0 from 0 to 1, tag 7, .* no partner.*replica 1: 0 calls\n"
        rf"  with a different {said}: replica {replica} .*: recv source={received[0]} "
        rf".* at recv\.py:{replica} in step_fn\nFix: .*the same {said};.*"
        r"the source send",
    ):
        match.check(calls)


def test_messages_of_others_are_no_near_misses() -> None:
    sends = [_addressed("send", 0, 0, 1, tag) for tag in range(2)]
    far = _addressed("recv", 2, 1, 2, 5)  # shares only a part of its address
    with pytest.raises(errors.MismatchError, match="Message 0") as caught:
        match.check([sends, [], [far]])
    assert "different" not in str(caught.value)


def test_of_many_near_misses_those_are_named_that_differ_in_the_least() -> None:
    near = [_addressed("recv", 1, 2, 1, tag) for tag in range(5)]
    near.append(_addressed("recv", 1, 0, 1, 9))
    with pytest.raises(errors.MismatchError) as caught:
        match.check([[_addressed("send", 0, 0, 1, 7)], near, []])
    assert str(caught.value).count("with a different") == 3
    message = str(caught.value)
    assert message.index("different tag:") < message.index("different source and tag:")


@pytest.mark.parametrize("paired", [False, True], ids=["alone", "same line"])
def test_a_call_in_another_group_is_named(paired: bool) -> None:
    """Even if it has partners there, when all of them are on one line."""
    calls: list[list[Call]] = [
        [call("0,1:0", 0, group=(0, 1))],
        [call("1,2:0", 1, group=(1, 2))],
        [call("1,2:0", 2, group=(1, 2))] if paired else [],
    ]
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)call 0 of group \[0, 1\] of replica 0 .*replica 1: 0 calls\n"
        r"  with a different group: replica 1 .*group=\[1, 2\].* at train\.py:4 in "
        r"step_fn\nFix: .*the same group; otherwise, let every replica",
    ):
        match.check(calls)


@pytest.mark.parametrize("group", [(0, 1, 2), (1, 2)])
def test_a_call_of_another_kind_and_group_is_named(group: tuple[int, ...]) -> None:
    first = call("0,1:0", 0, group=(0, 1), line="train.py:4 in step_fn")
    others = [
        call("0", r, "all_gather", {}, group=group, line=f"train.py:{r} in step_fn")
        for r in (1, 2)
    ]
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)of group \[0, 1\] of replica 0 has no partner.*train.py:4.*"
        r"replica 1: 0 calls, but all_gather .*at train.py:1 in step_fn\nFix",
    ):
        match.check([[first], others[:1], others[1:]])
