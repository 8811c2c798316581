# SPDX-License-Identifier: Apache-2.0
"""Results of functions on replicas are joined according to their Value."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist import results
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.results import Result
from replicator.autodist.values import Values

COUNTS = (2, 1)


def _joined(value: Value, *own: Any, are_split: bool = True) -> Any:
    leaves = [[None if x is None else tf.convert_to_tensor(x) for x in own]]
    (joined,) = results.joined([Result(value, "a.py:3")], leaves, COUNTS, are_split)
    return joined


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
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"(?s)returned int32\(2,\).*at a\.py:3.*Fix",
    ):
        _joined(SAME, [1, 2], [1, 3])


def test_where_nothing_is_split_the_first_replica_has_computed_all() -> None:
    for value in (SAME, UNKNOWN, Value(Kind.ROWS)):
        actual = _joined(value, [1, 2], [1, 3], are_split=False)
        assert actual.numpy().tolist() == [1, 2]


def test_what_differs_and_is_not_known_is_refused_by_its_line() -> None:
    for replica_values in ([3.0, 6.0], [[1, 2], [1, 2]]):
        with pytest.raises(
            errors.UnsupportedError, match=r"(?s)at a\.py:3.*Fix: return"
        ):
            _joined(UNKNOWN, *replica_values)


def test_what_normalized_examples_make_is_a_mean_and_a_warning_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *a: messages.append(text % a))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        op = tf.no_op("normalize")
        for kind in (Kind.MEAN, Kind.STATISTIC):
            mixed = Value(kind, mixed=op)
            assert session.run(_joined(mixed, 3.0, 6.0)) == 4
    assert messages[0].startswith("normalize ") and "(a.py:3) is neither" in messages[1]
    np.testing.assert_equal(_joined(SAME, 3.0, 3.0).numpy(), 3)


def test_in_a_graph_it_is_compared_when_that_runs() -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert session.run(_joined(SAME, [1, 2], [1, 2])).tolist() == [1, 2]
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"at a\.py:3"):
            session.run(_joined(SAME, [1, 2], [1, 3]))


def test_leaves_are_looked_at_and_what_they_are_computed_of_is_needed() -> None:
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 2])
        mean = tf.reduce_mean(x)
        leaves = ["a", mean, tf.sqrt(mean), x, tf.random.uniform([])]
        values = Values(Program(graph, []).flow)
        own: Any = types.SimpleNamespace(are_split=True, kinds=lambda tensors: values)
        actual = results.look(leaves, own)
        kinds = [one.value.kind for one in actual]
        assert kinds == [Kind.SAME, Kind.MEAN, Kind.STATISTIC, Kind.ROWS, Kind.DRAWN]
        assert [one.cut is not None for one in actual] == [False, False, True] + [
            False
        ] * 2
        assert any(one is mean for one in results.needed(actual))
        assert all("test_results.py" in one.line for one in actual[1:])
        own.are_split = False
        assert results.look([mean], own)[0].value == UNKNOWN
