# SPDX-License-Identifier: Apache-2.0
"""The axis of the examples in lookups, lookup indices and segment sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import lookups
from replicator.autodist.kinds import Kind
from replicator.autodist.program import Program
from replicator.autodist.values import Values
from tests.autodist.helpers import known

v1 = tf.compat.v1
Make = Callable[[tf.Tensor], tf.Tensor]
TABLE = np.ones([4, 5, 6], np.float32)


def _ids(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(x[:, 0], tf.int32)


def _places(x: tf.Tensor) -> tf.Tensor:
    return tf.range(tf.shape(x)[0])


def _across(x: tf.Tensor) -> tf.Tensor:  # [3, n]
    return tf.transpose(x)


# The examples are along the axis whose size is unknown.
ROWS: dict[str, Make] = {
    "rows of a table": lambda x: tf.gather(TABLE, _ids(x)),
    "columns of a table": lambda x: tf.gather(TABLE, _ids(x), axis=2),
    "several of each": lambda x: tf.gather(TABLE, tf.cast(x, tf.int32), axis=1),
    "a column of rows": lambda x: tf.gather(x, 2, axis=1),
    "columns of rows": lambda x: tf.gather(x, [[0, 1], [2, 0]], axis=1),
    "before the examples": lambda x: tf.gather(_across(x), [[0, 1]]),
    "all places": lambda x: tf.gather(x, _places(x)),
    "one of each": lambda x: tf.gather(x, _ids(x)[:, None], batch_dims=1),
    "slices of a table": lambda x: tf.gather_nd(TABLE, tf.cast(x, tf.int32)[:, :2]),
    "one of each by place": lambda x: tf.gather_nd(
        x, tf.stack([_places(x), _ids(x)], 1)
    ),
    "one hot": lambda x: tf.one_hot(_ids(x), 4),
    "one hot across": lambda x: tf.one_hot(_ids(x), 4, axis=0),
    "sparse": lambda x: tf.sparse.sparse_dense_matmul(
        tf.sparse.from_dense(x), np.ones([3, 2], np.float32)
    ),
}
UNKNOWN: dict[str, Make] = {
    "other examples": lambda x: tf.gather(x, _ids(x)),
    "some examples": lambda x: tf.gather(x, [0, 1]),
    "examples of a scaled table": lambda x: tf.gather(
        TABLE, tf.cast(x[:, 0] * tf.cast(tf.size(x), tf.float32), tf.int32)
    ),
    "other examples, by slices": lambda x: tf.gather_nd(x, _ids(x)[:, None]),
    "one hot of as many": lambda x: tf.one_hot(_ids(x), tf.shape(x)[0]),
    "places behind the first": lambda x: tf.range(1, tf.shape(x)[0]),
    "other places": lambda x: tf.gather(x, _places(x) * 1),
    "half of the squares of places": lambda x: tf.nn.l2_loss(
        tf.cast(_places(x), tf.float32)
    ),
    "sums as many as examples": lambda x: tf.math.unsorted_segment_sum(
        x, _ids(x), tf.shape(x)[0]
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_axis_of_the_examples_is_the_one_of_unknown_size(name: str) -> None:
    tensor, value = known(ROWS[name])
    assert value.kind is Kind.ROWS and not value.power
    assert [size is None for size in tensor.shape.as_list()] == [
        axis == value.axis for axis in range(tensor.shape.rank)
    ]


@pytest.mark.parametrize("shape", [TABLE.shape, tf.TensorShape(None)])
@pytest.mark.parametrize("places", [1, 2])
def test_what_is_looked_up_in_a_variable_has_rows(shape: Any, places: int) -> None:
    with tf.Graph().as_default() as graph:
        table = tf.Variable(TABLE, shape=shape)
        indices = v1.placeholder(tf.int32, [None, 2])
        find = tf.gather_nd if places > 1 else tf.gather
        found = find(table, indices[:, 0] if places == 1 else indices)
        value = Values(Program(graph, [table]).flow).of(found)
    assert (value.kind, value.axis) == (Kind.ROWS, 0)


def test_an_axis_from_the_end_needs_a_table_of_known_rank() -> None:
    _, value = known(
        lambda x: tf.gather(v1.placeholder_with_default(TABLE, None), _ids(x), axis=-1)
    )
    assert value.kind is Kind.UNKNOWN


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_known_of_what_depends_on_a_replicas_part(name: str) -> None:
    assert known(UNKNOWN[name])[1].kind is Kind.UNKNOWN


def test_sums_by_numbers_that_examples_have_are_sums_over_them() -> None:
    _, value = known(lambda x: tf.math.unsorted_segment_sum(x, _ids(x), 4))
    assert (value.kind, value.power) == (Kind.MEAN, 1)


def test_rows_that_were_left_out_are_told_from_others_by_what_is_true() -> None:
    def product(one: float, two: float) -> Make:
        def make(x: tf.Tensor) -> tf.Tensor:
            y = x[:, 0]
            return tf.boolean_mask(x, y > one) * tf.boolean_mask(x, y > two)

        return make

    _, value = known(product(0.0, 0.0))
    assert value.kind is Kind.ROWS and value.some is not None
    assert known(product(0.0, 1.0))[1].kind is Kind.UNKNOWN


def test_marks_are_equal_for_what_is_computed_alike() -> None:
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None])
        marks = [
            lookups.mark(one)
            for one in (x > 0, tf.reshape(x > 0, [-1]), x >= 0, x > 1, 2 * x > 0)
        ]
    assert marks[0] == marks[1]
    assert len(set(marks)) == 4
