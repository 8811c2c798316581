# SPDX-License-Identifier: Apache-2.0
"""Pairs of calls and ops, and the errors for calls without a pair. Needs no graph."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import pytest

from replicator import errors
from replicator.graph.ir.placeholder import Call, Value
from replicator.graph.matching import gradients, match
from replicator.primitives import table

F32 = Value("float32", (3,))
LINE, ONE, TWO, THREE = (f"train.py:{n} in step_fn" for n in (4, 7, 8, 9))


def call(
    key: str = "0",
    replica: int = 0,
    primitive: str = "all_reduce",
    options: dict[str, Any] | None = None,
    values: tuple[Value, ...] = (F32,),
    line: str = LINE,
    group: tuple[int, ...] = (0, 1),
    **more: Any,
) -> Call:
    return Call(
        primitive=primitive,
        options={"op": "sum"} if options is None else options,
        replica_id=replica,
        device=f"/device:CPU:{replica}",
        group=group,
        key=key,
        operands=values,
        agreed=values,
        line=line,
        facts=table.FACTS[primitive],
        **more,
    )


def message(primitive: str, replica: int, key: str = "0>1#7:0", **facts: Any) -> Call:
    return call(key, replica, primitive, {}, **facts)


def refused(
    name: str,
    pattern: str,
    calls: Sequence[Sequence[Call]],
    passes: Sequence[gradients.Passes] = (),
    error: type[errors.ReplicatorError] = errors.MismatchError,
    lacks: str = "(nothing)",
) -> None:
    """Asserts that calls are refused by a message."""
    try:
        match.check(calls, passes=passes)
    except error as caught:
        text = str(caught)
        law = "the message names what differs, the lines and the fix"
        assert re.search(pattern, text, re.DOTALL) and lacks not in text, (
            f"{law}: {name}: {text}"
        )
    else:
        pytest.fail(f"what does not pair is refused: {name}")


# --- Calls that pair ------------------------------------------------------------------

_EVERYONE = (0, 1, 2)
_ENDS = (0, 2)


def _of_shapes(*shapes: Any) -> list[list[Call]]:
    return [
        [call(replica=r, values=(Value("float32", shape),))]
        for r, shape in enumerate(shapes)
    ]


PAIRED: dict[str, list[list[Call]]] = {
    "none": [[], []],
    "in order": [
        [call("0", r, group=_EVERYONE), call("1", r, group=_EVERYONE)]
        for r in _EVERYONE
    ],
    "alone": [[call("0", group=(0,)), call("0/0", group=(0,))]],
    # By their calls, in whatever order they were built.
    "gradients": [
        [call(key, 0) for key in ("0", "1", "0/0", "1/0", "1/0/0")],
        [call(key, 1) for key in ("0", "1", "1/0", "1/0/0", "0/0")],
    ],
    "groups": [
        [call("0,2:0", 0, group=_ENDS), call("0", 0, group=_EVERYONE)],
        [call("0", 1, group=_EVERYONE)],
        [call("0", 2, group=_EVERYONE), call("0,2:0", 2, group=_ENDS)],
    ],
    "a message": [[message("send", 0)], [message("recv", 1)]],
    "scalars": _of_shapes((), ()),
    "an unknown rank": _of_shapes(None, (3,)),
    "unknown ranks": _of_shapes(None, None),
    "unknown sizes": _of_shapes((None, 2), (4, None)),
}


@pytest.mark.parametrize("what", PAIRED)
def test_calls_that_pair(what: str) -> None:
    match.check(PAIRED[what])


# --- Gradients of several losses ------------------------------------------------------


def _taken(replica: int, *lines: str, key: str = "0") -> list[Call]:
    backward = [call(f"{key}/{k}", replica, line=x) for k, x in enumerate(lines)]
    return [call(key, replica), *backward]


def _passes(*counts: tuple[int, int]) -> list[gradients.Passes]:
    """For each replica: passes at line ONE, and the number of that of its gradient."""
    return [
        gradients.Passes({ONE: count}, {"0/0": number} if number else {})
        for count, number in counts
    ]


_FIRST, _SECOND = gradients.Passes({ONE: 1}), gradients.Passes({TWO: 1})
_BOTH = gradients.Passes({ONE: 1, TWO: 1})
_LINES = r"train.py:7.*train.py:8.*"
# The lines of both replicas' gradients, their passes, and the error, if any.
LOSSES: dict[str, tuple[list[list[str]], list[gradients.Passes], str]] = {
    "in one order": ([[ONE, TWO], [ONE, TWO]], [], ""),
    "each in its own branch": ([[ONE, ONE], [TWO, THREE]], [], ""),
    "swapped": ([[ONE, TWO], [TWO, ONE]], [], _LINES + "the same order"),
    "swapped with others": ([[ONE, TWO], [TWO, THREE]], [], _LINES + "the same order"),
    # Replica 0's first loss depends on the call, and replica 1's second one.
    "one loss each": ([[ONE], [TWO]], [_FIRST, _SECOND], ""),
    "two on replica 0": (
        [[ONE], [TWO]],
        [_BOTH, _SECOND],
        _LINES + r"Fix: .* add tf\.reduce_sum",
    ),
    "two on replica 1": (
        [[ONE], [TWO]],
        [_FIRST, _BOTH],
        _LINES + r"Fix: .* add tf\.reduce_sum",
    ),
    "two on both": (
        [[ONE], [TWO]],
        [_BOTH, _BOTH],
        _LINES + r"Fix: .* add tf\.reduce_sum",
    ),
    # At one line, or in a loop.
    "both first": ([[ONE], [ONE]], _passes((2, 1), (2, 1)), ""),
    "first and second": (
        [[ONE], [ONE]],
        _passes((2, 1), (2, 2)),
        "another loss.*\n.*train.py:7",
    ),
    "second and first": (
        [[ONE], [ONE]],
        _passes((2, 2), (3, 1)),
        "another loss.*\n.*train.py:7",
    ),
    "a loss of its own before": ([[ONE], [ONE]], _passes((1, 1), (2, 2)), ""),
    "nothing is known": ([[ONE], [ONE]], _passes((2, 0), (2, 2)), ""),
}


@pytest.mark.parametrize("what", LOSSES)
def test_gradients_pair_with_those_of_the_same_loss(what: str) -> None:
    lines, passes, pattern = LOSSES[what]
    calls = [_taken(r, *of_replica) for r, of_replica in enumerate(lines)]
    if pattern:
        refused(what, pattern, calls, passes)
    else:
        match.check(calls, passes=passes)


def test_messages_may_be_differentiated_in_another_order_at_their_ends() -> None:
    backward = [
        message("recv", 0, "0>1#7:0/0", line=ONE),
        message("send", 1, "0>1#7:0/0", line=ONE),
    ]
    forward = [message("send", 0), message("recv", 1)]
    passes = [gradients.Passes({ONE: 2}, {"0>1#7:0/0": n}) for n in (1, 2)]
    match.check(
        [list(pair) for pair in zip(forward, backward, strict=True)], (), passes
    )


# --- Differences ----------------------------------------------------------------------

DIFFERENCES = {
    "primitive": ({"primitive": "broadcast"}, "not the same primitive", "broadcast"),
    "op": ({"options": {"op": "max"}}, "not the same op", "op=max"),
    "extra option": ({"options": {"op": "sum", "x": 1}}, "not the same x", "x=1"),
    "condition": ({"conditional": True}, "only one may be left out", "op=sum"),
    "dtype": (
        {"values": (Value("float64", (3,)),)},
        r"not the same dtype \(float32\[3\] and float64\[3\]\)",
        r"float64\[3\]",
    ),
    "size": (
        {"values": (Value("float32", (9,)),)},
        r"not the same shape \(float32\[3\] and float32\[9\]\)",
        r"float32\[9\]",
    ),
    "rank": (
        {"values": (Value("float32", (3, None)),)},
        r"not the same shape \(float32\[3\] and float32\[3, \?\]\)",
        r"float32\[3, \?\]",
    ),
    "number": ({"values": (F32, F32)}, "not the same number of tensors", "float32"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_names_both_lines_and_the_fix(what: str) -> None:
    change, said, shown = DIFFERENCES[what]
    calls = [[call(key, r, group=_EVERYONE) for key in "01"] for r in _EVERYONE]
    other = "train.py:44 in step_fn"
    calls[2][1] = call("1", 2, **change, group=_EVERYONE, line=other)
    pattern = (
        rf"Communication call 1 differs between replicas: {said}.*"
        r"replica 0 \(/device:CPU:0\): all_reduce op=sum float32\[3\] at train.py:4 in "
        rf"step_fn\n.*replica 2 \(/device:CPU:2\): .*{shown}.* at {other}\n.*Fix: "
    )
    refused(what, pattern, calls)


def _two(*keys: str, **last: Any) -> list[list[Call]]:
    """Both replicas make the calls, and replica 1's last one differs."""
    calls = [[call(key, r) for key in keys] for r in range(2)]
    calls[1][-1] = dataclasses.replace(calls[1][-1], **last)
    return calls


_WRITTEN = [
    [
        call(
            *("0", r, "all_reduce", {"op": "mean"}, (Value("float32", (size, 4)),)),
            assignment=("v:0", "assign", "v"),
        )
    ]
    for r, size in enumerate((2, 3))
]
_NO_PARTNER = (
    r"Communication call 1 of replica {one} has no partner: all_reduce op=sum "
    r"float32\[3\] at train.py:7.*replica {other}: 1 call, the last one: .*train.py:4 "
    r"in step_fn.*Fix: .*same calls in the same order"
)
_SENT = r"^{} of replica {}.*Fix: .*the source send and the dest"
OTHERS: dict[str, tuple[list[list[Call]], str]] = {
    "one tensor among many": (
        [
            [call(values=(F32, F32, F32, F32))],
            [call(replica=1, values=(F32, F32, Value("int32", (3,)), F32))],
        ],
        r"dtype of tensor 2 \(float32\[3\] and int32\[3\]\).*\.\.\. \(4 tensors\)",
    ),
    "values that are assigned": (_WRITTEN, "same shape.*ON_READ"),
    "a gradient": (
        _two("0", "0/0", options={"op": "mean"}),
        "A gradient of communication call 0 differs.*in the gradient, at",
    ),
    "two sends": (
        [[message("send", 0)], [message("send", 1)]],
        "differs[^\n]*: both replicas send",
    ),
    "one more on replica 0": (
        [[call(), call("1", line=ONE)], [call("0", 1)]],
        _NO_PARTNER.format(one=0, other=1),
    ),
    "one more on replica 1": (
        [[call()], [call("0", 1), call("1", 1, line=ONE)]],
        _NO_PARTNER.format(one=1, other=0),
    ),
    "a gradient alone": (
        [[call("0"), call("0/0")], [call("0", 1)]],
        "A gradient of communication call 0 of replica 0 has no partner"
        ".*in the gradient, at train.py:4.*Fix: .*every replica that takes part "
        r"differentiate.*repl\.linked\(loss\)",
    ),
    "a call rather than its gradient": (
        [
            [call("0"), call("0/0"), call("1")],
            [call("0", 1), call("0/0", 1), call("0/1", 1)],
        ],
        "Communication call 1 of replica 0",
    ),
    "a call rather than a gradient that differs, too": (
        [
            [call("0"), call("0/0"), call("1")],
            [call("0", 1), *(call(k, 1, options={"op": "max"}) for k in ("0/0", "1"))],
        ],
        "^Communication call 1 differs",
    ),
    "one of three": (
        [[call(group=_EVERYONE)], [call("0", 1, group=_EVERYONE)], []],
        "^Communication call 0 of replica 0 has no partner.*replica 2: 0 calls",
    ),
    "a call of a group": (
        [[call("0,2:1", group=_ENDS)], [], []],
        r"^Communication call 1 of group \[0, 2\] of replica 0 has no partner"
        r".*replica 0: 1 call[^\n]*\n[^\n]*replica 2: 0 calls\n",
    ),
    "a send": (
        [[message("send", 0)], []],
        _SENT.format("Message 0 from 0 to 1, tag 7,", 0),
    ),
    "a recv": (
        [[], [message("recv", 1, "0>1#7:2")]],
        _SENT.format("Message 2 from 0 to 1, tag 7,", 1),
    ),
    "messages of two tags": (
        [[message("send", 0)], [message("recv", 1, "0>1#8:0")]],
        _SENT.format("Message 0 from 0 to 1, tag 7,", 0),
    ),
    "the gradient of a message": (
        [[message("recv", 0, "0>1#7:0/0")], []],
        "^A gradient of message 0 from 0 to 1, tag 7, of replica 0.*differentiate",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_does_not_pair_is_named(what: str) -> None:
    calls, pattern = OTHERS[what]
    refused(what, pattern, calls)


# --- Ops that are merged --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Site:
    """Stands for an op with calls of these keys."""

    replica_id: int
    keys: str
    construct: str = "call"
    op: Any = None
    group: tuple[int, ...] = (0, 1)

    @property
    def calls(self) -> tuple[Call, ...]:
        keys = self.keys.split()
        return tuple(call(key, self.replica_id, group=self.group) for key in keys)

    def site(self) -> str:
        return f"<{self.replica_id}: {self.construct} {self.keys}>"


def _loops(*keys: str) -> list[list[_Site]]:
    return [[_Site(r, own, "loop")] for r, own in enumerate(keys)]


_THIRD = [_Site(2, "1", "loop", group=(2,))]
_ALIKE = [[_Site(r, "0"), _Site(r, "1 2", "loop"), _Site(r, "3")] for r in range(2)]
_GRADIENTS = [[_Site(0, key) for key in ("0", "0/0", "1", "1/0")]]
_GRADIENTS.append([_Site(1, key) for key in ("1", "1/0", "0", "0/0")])
# The replicas' ops, and the groups that become one, each as (replica, place).
MERGED: dict[str, tuple[list[list[_Site]], list[str]]] = {
    "with a call in common": (_ALIKE, ["00 10", "01 11", "02 12"]),
    "of groups that meet": (_loops("0", "0 1", "1"), ["00 10 20"]),
    "of groups apart": ([*_loops("0", "0"), _THIRD], ["00 10", "20"]),
    "called twice": (
        [[_Site(r, "0", "function"), _Site(r, "0", "function")] for r in range(2)],
        ["00 10", "01 11"],
    ),
    # After the calls, in the order of replica 0.
    "gradients": (_GRADIENTS, ["00 12", "02 10", "01 13", "03 11"]),
}


@pytest.mark.parametrize("what", MERGED)
def test_ops_become_one(what: str) -> None:
    sites, expected = MERGED[what]
    found = [
        " ".join(f"{r}{sites[r].index(s)}" for s in node for r in [s.replica_id])
        for node in match.pair(sites)
    ]
    assert found == expected, what


_ELSEWHERE = [call("3", 2, line="train.py:9 in step_fn"), call("2", 1)]
_ABSENT = (
    r"^replica 0 makes a call .* where there is none of replica 1, 2: .*another branch"
    r".*\n  <0: {} 3>\n  replica 2 .*train.py:9 in step_fn\nFix: .*inside the same bra"
)
_PLACES = (
    r"different places in the control flow: {} on replica 0, inside a {} on replica 1.*"
    r"<0: .* 0>\n.*<1: .* 0>\nFix: .*inside the same branches"
)
STRUCTURES: dict[str, tuple[list[list[_Site]], str]] = {
    "the top level and a loop": (
        [[_Site(0, "0")], [_Site(1, "0", "loop")]],
        _PLACES.format("at the top level", "loop"),
    ),
    "a loop and a conditional": (
        [[_Site(0, "0", "loop")], [_Site(1, "0", "conditional")]],
        _PLACES.format("inside a loop", "conditional"),
    ),
    "one loop against two": (
        [[_Site(0, "0 1", "loop")], [_Site(1, "0", "loop"), _Site(1, "1", "loop")]],
        r"^replica 1 makes in two loops the calls that another replica makes in one\..*"
        r"<1: loop 0>\n.*<1: loop 1>\n.*<0: loop 0 1>\nFix: ",
    ),
    # Such as the other branch of a conditional: all levels together are complete.
    "a call of another level": (
        [[_Site(0, "3", group=_EVERYONE)], [], []],
        _ABSENT.format("call"),
    ),
    "a loop of another level": (
        [[_Site(0, "3", "loop", group=_EVERYONE)], [], []],
        _ABSENT.format("loop"),
    ),
}


@pytest.mark.parametrize("what", STRUCTURES)
def test_other_places_in_the_control_flow_are_named(what: str) -> None:
    sites, pattern = STRUCTURES[what]
    with pytest.raises(errors.MismatchError, match=f"(?s){pattern}"):
        match.pair(sites, calls=_ELSEWHERE)
