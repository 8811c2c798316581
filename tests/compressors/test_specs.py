# SPDX-License-Identifier: Apache-2.0
"""Texts of compressors: their meaning, and the errors of invalid ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicator
from replicator import compressors
from replicator.compressors import specs

SIMPLE: list[st.SearchStrategy[Any]] = [
    st.just(compressors.BF16()),
    st.just(compressors.FP16()),
    st.just(compressors.Int8()),
    st.builds(
        compressors.TopK,
        ratio=st.floats(0, 1, exclude_min=True) | st.just(1),
    ),
    st.builds(
        compressors.PowerSGD,
        rank=st.integers(1, 64),
        warm_start=st.booleans(),
        start_step=st.integers(0, 10_000),
    ),
]
ALL = st.one_of(
    *SIMPLE, st.builds(compressors.ErrorFeedback, compressor=st.one_of(*SIMPLE))
)


@given(ALL)
def test_a_text_stands_for_what_it_was_made_of(one: compressors.Compressor) -> None:
    assert compressors.parse(compressors.text(one)) == one


@pytest.mark.parametrize(
    ("text", "one"),
    [
        ("bf16", compressors.BF16()),
        (" bf16() ", compressors.BF16()),
        ("topk(ratio=0.25)", compressors.TopK(0.25)),
        ("powersgd(rank=2, start_step=9)", compressors.PowerSGD(2, start_step=9)),
        ("ef(int8)", compressors.ErrorFeedback(compressors.Int8())),
        (
            "ef(compressor=topk(ratio=1))",
            compressors.ErrorFeedback(compressors.TopK(1)),
        ),
        ("none", None),
        ("", None),
    ],
)
def test_texts(text: str, one: compressors.Compressor | None) -> None:
    assert compressors.parse(text) == one
    assert specs.compressor("x", text) == one
    if one is not None:
        assert str(compressors.parse(compressors.text(one))) == str(one)


def test_plain_options_are_left_out() -> None:
    one = compressors.ErrorFeedback(compressors.PowerSGD(rank=2))
    assert compressors.text(one) == "ef(powersgd(rank=2))"
    assert compressors.text(compressors.PowerSGD(4)) == "powersgd"
    assert compressors.text(None) == ""


THERE_ARE = (
    r'use one of "fp16", "bf16", "int8", "topk\(ratio=0\.01\)", '
    r'"powersgd\(rank=4, warm_start=True, start_step=0\)", "ef\(topk\)", "none"\.'
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fp8", "names 'fp8', which is not a compressor"),
        ("powersgd(rnak=4)", "has 'rnak', which is not an option of powersgd"),
        ("powersgd(4)", "has options without names; expected "),
        ("ef", "has ef without a compressor"),
        ("topk(ratio=0.1, ratio=0.2)", "has an option of topk twice"),
        ("ef(4)", None),
        ("ef(bf16, int8)", "has options without names; expected "),
        ("ef(bf16, compressor=int8)", "has options without names"),
        ("bf16(**{})", "has 'None', which is not an option of bf16"),
        ("topk(ratio=1+1)", None),
        ("topk(ratio=f)", "names 'f', which is not a compressor"),
        ("topk(ratio=lambda: 1)", "has an option that is not a plain value"),
        ("os.system('true')", "names 'os.system', which is not a compressor"),
        ("bf16)", "cannot be read"),
        ("1", "is not a compressor"),
        ("(" * 300, "cannot be read"),
        ("\0", "cannot be read"),
    ],
)
def test_a_wrong_text_is_told_what_there_is(text: str, said: str | None) -> None:
    with pytest.raises(replicator.ArgumentError) as raised:
        compressors.parse(text)
    if said is not None:
        assert said in str(raised.value)
        assert pytest.importorskip("re").search(THERE_ARE, str(raised.value))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: compressors.TopK(0), r"topk was given ratio=0\."),
        (lambda: compressors.TopK(1.5), r"0 < ratio <= 1"),
        (lambda: compressors.TopK(float("nan")), r"ratio=nan"),
        (lambda: compressors.TopK("a"), r"ratio='a'"),
        (lambda: compressors.TopK(True), r"ratio=True"),
        (lambda: compressors.PowerSGD(0), r"rank is a Python int of at least 1"),
        (lambda: compressors.PowerSGD(2.0), r"powersgd was given rank=2\.0"),
        (lambda: compressors.PowerSGD(start_step=-1), r"start_step=-1"),
        (lambda: compressors.PowerSGD(warm_start=1), r"warm_start is True or False"),
        (lambda: compressors.ErrorFeedback(None), r"compressor=None"),
        (lambda: compressors.ErrorFeedback("bf16"), r"ef\(powersgd\(rank=4\)\)"),
        (lambda: compressors.parse("ef(ef(bf16))"), r"without error feedback of its"),
        (lambda: compressors.parse(3), r"is not a str"),
    ],
)
def test_wrong_options(make: Any, said: str) -> None:
    with pytest.raises(replicator.ArgumentError, match=said):
        make()


@dataclasses.dataclass(frozen=True)
class Own(compressors.Compressor):
    """A user's."""


def test_a_users_own_has_no_text() -> None:
    with pytest.raises(replicator.ArgumentError, match=r"Own\(\) cannot be written"):
        compressors.text(Own())
    with pytest.raises(replicator.ArgumentError, match=r"cannot be written"):
        compressors.text(compressors.ErrorFeedback(Own()))


def test_a_class_in_place_of_an_object() -> None:
    with pytest.raises(replicator.ArgumentError, match=r"Create an instance: BF16"):
        specs.compressor("all_reduce", compressors.BF16)
    with pytest.raises(replicator.ArgumentError, match=r"was given compressor=4\."):
        specs.compressor("all_reduce", 4)
