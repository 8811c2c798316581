"""Which calls pair, and what is said of those that do not. Needs no graph."""

from __future__ import annotations

from typing import Any

import pytest

from replicator import errors
from replicator.graph import match
from replicator.graph.placeholder import Call, Value


def call(
    key: str = "0",
    replica: int = 0,
    primitive: str = "all_reduce",
    options: dict[str, Any] | None = None,
    values: tuple[Value, ...] = (Value("float32", (3,)),),
    line: str = "train.py:4 in step_fn",
) -> Call:
    return Call(
        primitive=primitive,
        options={"op": "sum"} if options is None else options,
        replica_id=replica,
        device=f"/device:CPU:{replica}",
        key=key,
        operands=values,
        agreed=values,
        line=line,
    )


def test_pairs_calls_in_order() -> None:
    calls = [[call("0", r), call("1", r)] for r in range(3)]
    assert match.match(calls) == [(0, 0, 0), (1, 1, 1)]


def test_no_calls() -> None:
    assert match.match([[], []]) == []


def test_one_replica_pairs_with_itself() -> None:
    assert match.match([[call("0"), call("0/0")]]) == [(0,), (1,)]


def test_gradients_pair_by_their_calls_in_whatever_order_they_were_built() -> None:
    calls = [
        [call(key, 0) for key in ("0", "1", "0/0", "1/0", "1/0/0")],
        [call(key, 1) for key in ("0", "1", "1/0", "1/0/0", "0/0")],
    ]
    assert match.match(calls) == [(0, 0), (1, 1), (2, 4), (3, 2), (4, 3)]


@pytest.mark.parametrize(
    ("one", "two"),
    [((3,), (3,)), (None, (3,)), ((None, 2), (4, None)), ((), ()), (None, None)],
    ids=str,
)
def test_shapes_that_may_turn_out_equal_pair(one: Any, two: Any) -> None:
    calls = [[call(values=(Value("float32", shape),))] for shape in (one, two)]
    assert match.match(calls) == [(0, 0)]


F32 = Value("float32", (3,))
DIFFERENCES = {
    "primitive": ({"primitive": "broadcast"}, "not the same primitive", "broadcast"),
    "op": ({"options": {"op": "max"}}, "not the same op", "op=max"),
    "extra option": (
        {"options": {"op": "sum", "when": True}},
        "not the same when",
        "when=True",
    ),
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
    calls = [[call("0", r), call("1", r)] for r in range(2)] + [
        [call("0", 2), call("1", 2, **change, line="train.py:44 in step_fn")]
    ]
    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)Communication call 1 differs between replicas: {said}.*"
        r"replica 0 \(/device:CPU:0\): all_reduce op=sum float32\[3\] "
        r"at train.py:4 in step_fn\n"
        rf".*replica 2 \(/device:CPU:2\): .*{shown}.* at train.py:44 in step_fn\n"
        r".*Fix: ",
    ):
        match.match(calls)


def test_a_difference_of_one_tensor_among_many_says_which() -> None:
    calls = [
        [call(values=(F32, F32, F32, F32))],
        [call(values=(F32, F32, Value("int32", (3,)), F32))],
    ]
    with pytest.raises(
        errors.MismatchError,
        match=r"dtype of tensor 2 \(float32\[3\] and int32\[3\]\)"
        r"(?s:.*)\.\.\. \(4 tensors\)",
    ):
        match.match(calls)


def test_a_difference_in_a_gradient_says_so() -> None:
    calls = [
        [call("0"), call("0/0")],
        [call("0", 1), call("0/0", 1, options={"op": "mean"})],
    ]
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)A gradient of communication call 0 differs.*in the gradient, at",
    ):
        match.match(calls)


@pytest.mark.parametrize("longer", [0, 1])
def test_a_call_without_partner_is_named(longer: int) -> None:
    calls = [[call("0", r)] for r in range(2)]
    calls[longer].append(call("1", longer, line="train.py:50 in step_fn"))
    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)Communication call 1 of replica {longer} has no partner: "
        r"all_reduce op=sum float32\[3\] at train.py:50.*"
        rf"replica {1 - longer}: 1 calls, the last one: .*train.py:4 in step_fn"
        r".*Fix: .*same calls in the same order",
    ):
        match.match(calls)


def test_a_replica_without_calls_is_named() -> None:
    with pytest.raises(
        errors.MismatchError, match=r"(?s)call 0 of replica 0.*replica 1: 0 calls\n"
    ):
        match.match([[call()], []])


def test_a_gradient_without_partner_is_named() -> None:
    calls = [[call("0"), call("0/0")], [call("0", 1)]]
    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)A gradient of communication call 0 of replica 0 has no partner"
        r".*in the gradient, at train.py:4.*Fix: .*same gradients",
    ):
        match.match(calls)


def test_a_missing_call_is_named_rather_than_its_gradient() -> None:
    calls = [[call("0"), call("0/0"), call("1")], [call("0", 1), call("0/0", 1)]]
    calls[1].append(call("0/1", 1))
    with pytest.raises(errors.MismatchError, match="Communication call 1 of replica 0"):
        match.match(calls)
