# SPDX-License-Identifier: Apache-2.0
"""What functions return on replicas is put together by what it is of the examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist import results
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.autodist.results import Result

COUNTS = (2, 1)


def _joined(value: Value, *own: Any, are_split: bool = True) -> Any:
    given = [[None if x is None else tf.convert_to_tensor(x) for x in own]]
    (found,) = results.joined([Result(value, "a.py:3")], given, COUNTS, are_split)
    return found


def test_leaves_are_joined_by_what_they_are_of_the_examples() -> None:
    assert _joined(Value(Kind.MEAN), 3.0, 6.0) == 4
    assert _joined(Value(Kind.MEAN, 1), 3, 6) == 9
    assert _joined(Value(Kind.MAX), 3.0, 6.0) == 6
    rows = _joined(Value(Kind.ROWS), [[1.0], [2.0]], [[3.0]])
    assert rows.numpy().tolist() == [[1], [2], [3]]


def test_what_is_drawn_or_no_tensor_is_that_of_the_first_replica() -> None:
    assert _joined(Value(Kind.DRAWN), 3.0, 6.0) == 3
    assert results.joined([Result(SAME)], [["a", "a"]], COUNTS, True) == ["a"]


def test_what_is_to_be_the_same_is_compared() -> None:
    assert _joined(SAME, [1, 2], [1, 2]).numpy().tolist() == [1, 2]
    for value, are_split in ((SAME, True), (UNKNOWN, True), (Value(Kind.ROWS), False)):
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=r"(?s)returned int32\(2,\).*at a\.py:3.*Fix",
        ):
            _joined(value, [1, 2], [1, 3], are_split=are_split)


def test_what_differs_in_size_is_refused_by_its_line() -> None:
    with (
        tf.Graph().as_default(),
        pytest.raises(errors.UnsupportedError, match=r"(?s)at a\.py:3.*Fix: return"),
    ):
        _joined(UNKNOWN, *[tf.compat.v1.placeholder(tf.int32, [None])] * 2)


def test_numbers_of_which_nothing_is_known_are_means_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *a: said.append(text % a))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert session.run(_joined(UNKNOWN, 3.0, 6.0)) == 4
        assert len(said) == 1 and "(a.py:3) is no mean" in said[0]
        assert session.run(_joined(UNKNOWN, 3.0, 6.0, are_split=False)) == 4
        mixed = Value(Kind.MEAN, mixed=tf.no_op("normalize"))
        assert session.run(_joined(mixed, 3.0, 6.0)) == 4
    assert len(said) == 2 and said[1].startswith("normalize ")
    np.testing.assert_equal(_joined(SAME, 3.0, 3.0).numpy(), 3)
