# SPDX-License-Identifier: Apache-2.0
"""Pairs of calls and ops, and the errors for calls without a pair. Needs no graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from replicator import errors
from replicator.graph.ir.placeholder import Call, Value
from replicator.graph.matching import gradients, match
from replicator.primitives import table


def call(
    key: str = "0",
    replica: int = 0,
    primitive: str = "all_reduce",
    options: dict[str, Any] | None = None,
    values: tuple[Value, ...] = (Value("float32", (3,)),),
    line: str = "train.py:4 in step_fn",
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


_EVERYONE = (0, 1, 2)
_ENDS = (0, 2)
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
}


@pytest.mark.parametrize("what", PAIRED)
def test_calls_that_pair(what: str) -> None:
    match.check(PAIRED[what])


def test_gradients_of_two_losses_in_another_order_are_refused() -> None:
    one, two, three = (f"train.py:{n} in step_fn" for n in (7, 8, 9))

    def taken(replica: int, *lines: str) -> list[Call]:
        keys = enumerate(lines)
        backward = [call(f"0/{k}", replica, line=line) for k, line in keys]
        return [call("0", replica), *backward]

    match.check([taken(0, one, two), taken(1, one, two)])
    match.check([taken(0, one, one), taken(1, two, three)])  # each in its own branch
    for other in ((two, one), (two, three)):
        with pytest.raises(
            errors.MismatchError, match=r"(?s)train.py:7.*train.py:8.*the same order"
        ):
            match.check([taken(0, one, two), taken(1, *other)])


ONE, TWO = "train.py:7 in step_fn", "train.py:8 in step_fn"


def taken(replica: int, line: str, key: str = "0") -> list[Call]:
    return [call(key, replica), call(f"{key}/0", replica, line=line)]


def test_gradients_of_losses_that_each_reach_a_call_on_one_replica_are_refused() -> (
    None
):
    """Replica 0's first loss depends on the call, and replica 1's second one."""
    replicas = [taken(0, ONE), taken(1, TWO)]
    first, second = gradients.Passes({ONE: 1}), gradients.Passes({TWO: 1})
    both = gradients.Passes({ONE: 1, TWO: 1})
    match.check(replicas, passes=[first, second])  # one loss each, in its own branch
    for passes in ([both, second], [first, both], [both, both]):
        with pytest.raises(
            errors.MismatchError,
            match=r"(?s)train.py:7.*train.py:8.*Fix: .* add tf\.reduce_sum",
        ):
            match.check(replicas, passes=passes)


@pytest.mark.parametrize(
    ("counts", "numbers", "refused"),
    [
        ((2, 2), (1, 1), False),
        ((2, 2), (1, 2), True),
        ((2, 3), (2, 1), True),
        ((1, 2), (1, 2), False),  # replica 1 has a loss of its own before
        ((2, 2), (0, 2), False),  # nothing is known
    ],
)
def test_so_are_those_that_are_taken_at_one_line_or_in_a_loop(
    counts: tuple[int, int], numbers: tuple[int, int], refused: bool
) -> None:
    replicas = [taken(0, ONE), taken(1, ONE)]
    passes = [
        gradients.Passes({ONE: count}, {"0/0": number} if number else {})
        for count, number in zip(counts, numbers, strict=True)
    ]
    if not refused:
        match.check(replicas, passes=passes)
        return
    with pytest.raises(errors.MismatchError, match=r"another loss.*\n.*train.py:7"):
        match.check(replicas, passes=passes)


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


@pytest.mark.parametrize(
    ("one", "two"),
    [((3,), (3,)), (None, (3,)), ((None, 2), (4, None)), ((), ()), (None, None)],
    ids=str,
)
def test_shapes_that_may_turn_out_equal_pair(one: Any, two: Any) -> None:
    match.check(
        [
            [call(replica=r, values=(Value("float32", shape),))]
            for r, shape in enumerate((one, two))
        ]
    )


F32 = Value("float32", (3,))
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
    change, message, shown = DIFFERENCES[what]
    everyone = (0, 1, 2)
    calls = [
        [call("0", r, group=everyone), call("1", r, group=everyone)] for r in range(2)
    ]
    other = call("1", 2, **change, group=everyone, line="train.py:44 in step_fn")
    calls.append([call("0", 2, group=everyone), other])
    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)Communication call 1 differs between replicas: {message}.*"
        r"replica 0 \(/device:CPU:0\): all_reduce op=sum float32\[3\] "
        r"at train.py:4 in step_fn\n"
        rf".*replica 2 \(/device:CPU:2\): .*{shown}.* at train.py:44 in step_fn\n"
        r".*Fix: ",
    ):
        match.check(calls)


def test_a_difference_of_one_tensor_among_many_says_which() -> None:
    calls = [
        [call(values=(F32, F32, F32, F32))],
        [call(replica=1, values=(F32, F32, Value("int32", (3,)), F32))],
    ]
    with pytest.raises(
        errors.MismatchError,
        match=r"dtype of tensor 2 \(float32\[3\] and int32\[3\]\)"
        r"(?s:.*)\.\.\. \(4 tensors\)",
    ):
        match.check(calls)


def test_a_difference_in_a_gradient_says_so() -> None:
    calls = [
        [call("0"), call("0/0")],
        [call("0", 1), call("0/0", 1, options={"op": "mean"})],
    ]
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)A gradient of communication call 0 differs.*in the gradient, at",
    ):
        match.check(calls)


@pytest.mark.parametrize("longer", [0, 1])
def test_a_call_without_partner_is_named(longer: int) -> None:
    calls = [[call("0", r)] for r in range(2)]
    calls[longer].append(call("1", longer, line="train.py:50 in step_fn"))
    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)Communication call 1 of replica {longer} has no partner: "
        r"all_reduce op=sum float32\[3\] at train.py:50.*"
        rf"replica {1 - longer}: 1 call, the last one: .*train.py:4 in step_fn"
        r".*Fix: .*same calls in the same order",
    ):
        match.check(calls)


def test_a_gradient_without_partner_is_named() -> None:
    calls = [[call("0"), call("0/0")], [call("0", 1)]]
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)A gradient of communication call 0 of replica 0 has no partner"
        r".*in the gradient, at train.py:4.*Fix: .*every replica that takes part "
        r"differentiate.*repl\.linked\(loss\)",
    ):
        match.check(calls)


def test_a_missing_call_is_named_rather_than_its_gradient() -> None:
    calls = [[call("0"), call("0/0"), call("1")], [call("0", 1), call("0/0", 1)]]
    calls[1].append(call("0/1", 1))
    with pytest.raises(errors.MismatchError, match="Communication call 1 of replica 0"):
        match.check(calls)


@pytest.mark.parametrize(
    ("one", "two", "said"),
    [
        (("send", "0>1#7:0"), None, "Message 0 from 0 to 1, tag 7, of replica 0"),
        (None, ("recv", "0>1#7:2"), "Message 2 from 0 to 1, tag 7, of replica 1"),
        (
            ("send", "0>1#7:0"),
            ("recv", "0>1#8:0"),
            "Message 0 from 0 to 1, tag 7, of r",
        ),
        (
            ("recv", "0>1#7:0/0"),
            None,
            "A gradient of message 0 from 0 to 1, tag 7, of replica 0",
        ),
    ],
)
def test_a_message_without_partner_is_named(one: Any, two: Any, said: str) -> None:
    calls = [
        [] if what is None else [message(what[0], r, what[1])]
        for r, what in enumerate((one, two))
    ]
    fix = "differentiate" if "gradient" in said else "the source send and the dest"
    with pytest.raises(errors.MismatchError, match=rf"(?s)^{said}.*Fix: .*{fix}"):
        match.check(calls)


def test_two_sends_do_not_pair() -> None:
    with pytest.raises(errors.MismatchError, match="differs.*: both replicas send"):
        match.check([[message("send", 0)], [message("send", 1)]])


def test_a_call_of_a_group_is_named_with_the_group() -> None:
    calls = [[call("0,2:1", group=(0, 2))], [], []]
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)^Communication call 1 of group \[0, 2\] of replica 0 has no partner"
        r".*replica 0: 1 call.*replica 2: 0 calls\n",
    ) as caught:
        match.check(calls)
    assert "replica 1" not in str(caught.value)


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


def _pair(*replicas: list[_Site]) -> list[list[tuple[int, str]]]:
    nodes = match.pair(replicas)
    return [[(site.replica_id, site.keys) for site in node] for node in nodes]


def test_ops_with_a_call_in_common_become_one() -> None:
    sites = [[_Site(r, "0"), _Site(r, "1 2", "loop"), _Site(r, "3")] for r in range(2)]
    assert _pair(*sites) == [
        [(0, "0"), (1, "0")],
        [(0, "1 2"), (1, "1 2")],
        [(0, "3"), (1, "3")],
    ]


def test_ops_of_other_groups_become_one_where_a_third_replica_is_in_both() -> None:
    sites = [[_Site(r, keys, "loop")] for r, keys in enumerate(("0", "0 1", "1"))]
    assert _pair(*sites) == [[(0, "0"), (1, "0 1"), (2, "1")]]
    apart = [[_Site(r, "0", "loop")] for r in range(2)]
    apart.append([_Site(2, "1", "loop", group=(2,))])
    assert _pair(*apart) == [[(0, "0"), (1, "0")], [(2, "1")]]


def test_what_is_called_twice_pairs_in_order() -> None:
    sites = [[_Site(r, "0", "function"), _Site(r, "0", "function")] for r in range(2)]
    nodes = match.pair(sites)
    assert [
        [sites[r].index(site) for r, site in enumerate(node)] for node in nodes
    ] == [
        [0, 0],
        [1, 1],
    ]


def test_gradients_come_after_calls_in_the_order_of_replica_0() -> None:
    sites = [
        [_Site(0, "0"), _Site(0, "0/0"), _Site(0, "1"), _Site(0, "1/0")],
        [_Site(1, "1"), _Site(1, "1/0"), _Site(1, "0"), _Site(1, "0/0")],
    ]
    assert [node[0][1] for node in _pair(*sites)] == ["0", "1", "0/0", "1/0"]


@pytest.mark.parametrize(
    ("constructs", "said"),
    [
        (("call", "loop"), "at the top level on replica 0, inside a loop on replica 1"),
        (
            ("loop", "conditional"),
            "inside a loop on replica 0, inside a conditional on",
        ),
    ],
)
def test_other_places_in_the_control_flow_are_named(
    constructs: tuple[str, str], said: str
) -> None:
    sites = [[_Site(r, "0", what)] for r, what in enumerate(constructs)]
    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)different places in the control flow: {said}.*"
        rf"<0: {constructs[0]} 0>\n.*<1: {constructs[1]} 0>\n"
        r"Fix: .*inside the same branches",
    ):
        match.pair(sites)


def test_one_loop_against_two_is_named() -> None:
    sites = [[_Site(0, "0 1", "loop")], [_Site(1, "0", "loop"), _Site(1, "1", "loop")]]
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)^replica 1 makes in two loops the calls that another replica makes "
        r"in one\..*<1: loop 0>\n.*<1: loop 1>\n.*<0: loop 0 1>\nFix: ",
    ):
        match.pair(sites)


@pytest.mark.parametrize("construct", ["call", "loop"])
def test_a_call_whose_partners_stand_on_another_level_is_named(construct: str) -> None:
    """Such as the other branch of a conditional: all levels together are complete."""
    sites = [[_Site(0, "3", construct, group=(0, 1, 2))], [], []]
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)^replica 0 makes a call .* where there is none of replica 1, 2: .*"
        rf"another branch.*\n  <0: {construct} 3>\n  replica 2 .*train.py:9 in step_fn"
        r"\nFix: .*inside the same branches",
    ):
        elsewhere = [call("3", 2, line="train.py:9 in step_fn"), call("2", 1)]
        match.pair(sites, calls=elsewhere)


def test_assigned_values_of_other_shapes_are_not_called_other_calls() -> None:
    write = {"options": {"op": "mean"}, "assignment": ("v:0", "assign", "v")}
    values = [(Value("float32", (size, 4)),) for size in (2, 3)]
    calls = [[call("0", r, values=values[r], **write)] for r in range(2)]
    with pytest.raises(errors.MismatchError, match=r"(?s)same shape.*ON_READ"):
        match.check(calls)
