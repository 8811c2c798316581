# SPDX-License-Identifier: Apache-2.0
"""Replicas' parts of a value are joined, or it is recomputed from joined values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import joining
from replicator.autodist.kinds import SAME, Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.values import Values

v1 = tf.compat.v1
COUNTS = (3, 0, 1, 2)
# A replica's part of a value from its examples; one device's value from all of them.
OF_KIND: dict[Value, Callable[[np.ndarray], Any]] = {
    Value(Kind.ROWS): lambda rows: rows,
    Value(Kind.ROWS, axis=1): lambda rows: rows.T,
    Value(Kind.ROWS, -1): lambda rows: rows / len(rows),
    Value(Kind.MEAN): lambda rows: rows.mean(0),
    Value(Kind.MEAN, 1): lambda rows: rows.sum(0),
    Value(Kind.MEAN, 0.5): lambda rows: rows.mean(0) * len(rows) ** 0.5,
    Value(Kind.SAME, 1): lambda rows: np.float64(len(rows)),
    Value(Kind.MAX): lambda rows: rows.max(0),
    Value(Kind.MIN): lambda rows: rows.min(0),
}


def _dealt() -> tuple[np.ndarray, list[np.ndarray], list[tf.Tensor]]:
    """Returns examples, each replica's part, one of them a dummy, and their shares."""
    rows = np.random.default_rng(0).integers(-9, 9, [sum(COUNTS), 2])
    parts = np.split(rows, np.cumsum(COUNTS)[:-1])
    lent = [part if len(part) else rows[:1] for part in parts]
    shares = [tf.constant(n / sum(COUNTS)) for n in COUNTS]
    return rows, lent, shares


@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64"])
@pytest.mark.parametrize("value", OF_KIND, ids=str)
def test_values_of_parts_are_joined_to_that_of_all(value: Value, dtype: str) -> None:
    if dtype == "complex64" and value.kind in (Kind.MAX, Kind.MIN):
        return  # there are none
    rows, parts, shares = _dealt()
    of = OF_KIND[value]
    values = [tf.constant(of(part), dtype) for part in parts]
    actual = joining.of_parts(value, values, shares)
    np.testing.assert_allclose(actual, of(rows), rtol=1e-5, atol=1e-6)
    assert actual.dtype == dtype


def test_whole_numbers_truths_and_short_floats_are_joined_exactly() -> None:
    rows, parts, shares = _dealt()
    mean = Value(Kind.MEAN, 1)
    values = [tf.constant(part.sum(0), tf.int64) for part in parts]
    assert (
        joining.of_parts(mean, values, shares).numpy().tolist() == rows.sum(0).tolist()
    )
    values = [tf.constant(1000 + n, tf.float16) for n in (0, 5, 1, 2)]
    assert joining.of_parts(mean, values, shares) == tf.constant(3003, tf.float16)
    values = [tf.constant(truth) for truth in (False, False, True, False)]
    assert joining.of_parts(Value(Kind.MAX), values, shares)
    assert not joining.of_parts(Value(Kind.MIN), values, shares)
    assert joining.of_parts(SAME, values, shares) is values[0]


def test_what_has_no_examples_is_left_out_though_it_is_no_number() -> None:
    values = [tf.constant(x) for x in (1.0, np.nan, 4.0)]
    shares = [tf.constant(x) for x in (0.75, 0.0, 0.25)]
    assert joining.of_parts(Value(Kind.MEAN), values, shares) == 1.75


def test_parts_of_a_divisor_add_up_to_one_or_are_those_of_the_examples() -> None:
    def part(own: float, total: float) -> float:
        share = joining.part_of(*map(tf.constant, (own, total, 0.25)))
        return float(share)

    assert [part(3.0, 4.0), part(1.0, 4.0), part(0.0, 0.0)] == [0.75, 0.25, 0.25]


MEANS = Value(Kind.MEAN)
JOINED = [Value(Kind.ROWS), MEANS, Value(Kind.MEAN, 1), SAME, Value(Kind.MAX)]
NOT_JOINED = [
    *(Value(Kind.ROWS, order=("behind", 2, ())), Value(Kind.RATIO)),
    *(Value(Kind.STATISTIC), Value(Kind.UNKNOWN), Value(Kind.DRAWN)),
]


def test_what_can_be_joined_has_one_order_and_no_mixed_examples() -> None:
    assert all(map(joining.joins, JOINED)) and not any(map(joining.joins, NOT_JOINED))
    assert not joining.joins(Value(Kind.ROWS), rows=False)
    with tf.Graph().as_default():
        assert not joining.joins(MEANS.replaced(mixed=tf.no_op()))


def _cut(make: Callable[[tf.Tensor], tf.Tensor], shape: Any = (None, 2), **how: Any):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, shape)
        tensor = make(x)
        values = Values(Program(graph, []).flow)
        return x, tensor, joining.cut(values, tensor, **how)


def test_a_value_is_cut_where_it_can_be_joined_and_computed_once_more() -> None:
    _, root, cut = _cut(lambda x: tf.sqrt(tf.reduce_mean(x, 0)) + 1.0)
    assert {leaf.op.type: value.kind for leaf, value in cut.leaves} == {
        **{"Mean": Kind.MEAN, "Const": Kind.SAME}
    }
    assert {op.type for op in cut.ops} == {"Sqrt", "AddV2"}
    with tf.Graph().as_default(), v1.Session() as session:
        whole = {"Mean": [4.0, 9.0], "Const": 5.0}
        recomputed = joining.again(
            cut, root, lambda t, _: tf.constant(whole[t.op.type])
        )
        assert session.run(recomputed).tolist() == [7, 8]


def test_values_are_computed_of_rows_where_these_can_be_joined() -> None:
    *_, cut = _cut(lambda x: tf.nn.softmax(x, 0))
    rows = [leaf for leaf, value in cut.leaves if value.kind is Kind.ROWS]
    assert rows and all(leaf.shape.as_list().count(None) == 1 for leaf in rows)
    assert _cut(lambda x: tf.sort(x, 0), rows=False)[2] is None


REFUSED: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "draws": lambda x: tf.sqrt(tf.reduce_mean(x)) * tf.random.uniform([]),
    "asks Python": lambda x: v1.py_func(np.sort, [x], tf.float32),
    "draws in a function": lambda x: tf.function(
        lambda y: tf.sort(y, 0) + tf.random.uniform([])
    )(x),
    "has an effect": lambda x: tf.raw_ops.Print(input=tf.sort(x, 0), data=[]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nothing_is_computed_once_more_that_would_be_something_else(name: str) -> None:
    assert _cut(REFUSED[name])[2] is None


def test_nothing_is_computed_of_rows_whose_number_is_written_into_it() -> None:
    with tf.Graph().as_default() as graph:
        data = tf.data.Dataset.range(4).batch(2, drop_remainder=True)
        x = v1.data.make_one_shot_iterator(data).get_next()
        tensor = tf.sort(x)
        assert joining.cut(Values(Program(graph, []).flow), tensor) is None


def test_products_are_what_takes_time() -> None:
    assert joining.is_light(_cut(lambda x: tf.sort(x, 0))[2])
    product = _cut(lambda x: tf.matmul(x, x, transpose_b=True))[2]
    assert product is not None and not joining.is_light(product)
