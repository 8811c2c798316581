# SPDX-License-Identifier: Apache-2.0
"""What ops are said to make of rows of examples is true when a batch is in parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import rows
from replicator.autodist.kinds import SAME, Kind, Value
from tests.autodist.helpers import known, told

v1 = tf.compat.v1
Make = Callable[[tf.Tensor], tf.Tensor]


def _n(x: tf.Tensor) -> tf.Tensor:
    return tf.shape(x)[0]


def _count(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(_n(x), tf.float32)


def _across(x: tf.Tensor) -> tf.Tensor:  # [3, n]
    return tf.transpose(x)


def _some(x: tf.Tensor) -> tf.Tensor:
    return tf.boolean_mask(x, x[:, 0] > -0.5)


def _others(x: tf.Tensor) -> tf.Tensor:
    return tf.boolean_mask(x, x[:, 1] > -0.5)


def _matrices(x: tf.Tensor) -> tf.Tensor:  # [n, 3, 3], positive definite
    return x[:, :, tf.newaxis] * x[:, tf.newaxis] + 2 * tf.eye(3)


def _images(x: tf.Tensor) -> tf.Tensor:  # [n, 3, 1, 1]
    return x[:, :, tf.newaxis, tf.newaxis]


def _normalized(x: tf.Tensor, training: bool) -> tuple[tf.Tensor, ...]:
    return tuple(
        v1.nn.fused_batch_norm(
            _images(x), [1.5], [0.5], [0.1], [2.0], is_training=training
        )
    )


def _looked_up(x: tf.Tensor, default: list[float]) -> tf.Tensor:  # a vector for each
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, default)
    return table.lookup(tf.cast(x, tf.int64))


def _chosen(test: tf.Tensor, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    return tf.raw_ops.Select(condition=test, x=one, y=other)


VALUES: dict[str, tuple[Make, Kind, float]] = {
    # Element by element.
    "columns and a row": (lambda x: x[:, :1] * [[1.0, 2.0]], Kind.ROWS, 0),
    "a matrix and rows": (lambda x: _images(x)[..., 0] + tf.eye(3), Kind.ROWS, 0),
    "of more axes": (lambda x: x * tf.ones([2, 1, 3]), Kind.ROWS, 0),
    "across": (lambda x: _across(x) + [[1.0], [2.0], [3.0]], Kind.ROWS, 0),
    "as many from the end": (lambda x: tf.stack([x, -x]) * x, Kind.ROWS, 0),
    "n times": (lambda x: x * _count(x) - tf.zeros([3]), Kind.ROWS, 1),
    "over a power of n": (lambda x: tf.square(x / _count(x)), Kind.ROWS, -2),
    "chosen by each": (lambda x: _chosen(x[:, 0] > 0, x, -x), Kind.ROWS, 0),
    "chosen by each, n times": (
        lambda x: _chosen(x[:, 0] > 0, x * _count(x), -x * _count(x)),
        *(Kind.ROWS, 1),
    ),
    "n times and once": (lambda x: x * _count(x) + x, Kind.UNKNOWN, 0),
    "chosen among two sizes": (
        lambda x: _chosen(x[:, 0] > 0, x, x * _count(x)),
        *(Kind.UNKNOWN, 0),
    ),
    "chosen by some": (
        lambda x: _chosen(_some(x)[:, 0] > 0, *[_others(x)] * 2),
        *(Kind.UNKNOWN, 0),
    ),
    "chosen by some of all": (
        lambda x: _chosen(tf.constant([True] * 7), x, -x),
        *(Kind.UNKNOWN, 0),
    ),
    "other axes": (lambda x: x[:, tf.newaxis] * x, Kind.UNKNOWN, 0),
    "some and others": (lambda x: _some(x) + _others(x), Kind.UNKNOWN, 0),
    "some and the same": (lambda x: tf.add(*[_some(x)] * 2), Kind.ROWS, 0),
    "others twice": (
        lambda x: tf.concat([x, x], 0) + tf.reshape(tf.stack([x, x], 1), [-1, 3]),
        *(Kind.UNKNOWN, 0),
    ),
    "as many as there may be": (lambda x: x + tf.ones([7, 3]), Kind.UNKNOWN, 0),
    "unknown rank": (
        lambda x: x + v1.placeholder_with_default(np.float32(1), None),
        *(Kind.UNKNOWN, 0),
    ),
    "rows of unknown rank": (
        lambda x: v1.placeholder_with_default(x, None) * 2,
        *(Kind.ROWS, 0),
    ),
    "places, doubled": (lambda x: 2 * tf.range(_n(x)), Kind.UNKNOWN, 0),
    "places and rows": (
        lambda x: tf.range(_n(x)) + tf.cast(x[:, 0], tf.int32),
        *(Kind.UNKNOWN, 0),
    ),
    "cast": (lambda x: tf.cast(x * _count(x), tf.float64), Kind.ROWS, 1),
    "rounded": (lambda x: tf.cast(x * _count(x), tf.int32), Kind.UNKNOWN, 0),
    "bytes of texts": (
        lambda x: tf.io.decode_raw(tf.strings.as_string(x[:, 0], width=9), tf.uint8),
        *(Kind.ROWS, 0),
    ),
    "found in a table": (lambda x: _looked_up(x[:, 0], [4.0]), Kind.ROWS, 0),
    "vectors found in a table": (lambda x: _looked_up(x, [4.0, 5.0]), Kind.ROWS, 0),
    # Reductions.
    "over columns": (lambda x: tf.reduce_sum(x, 1), Kind.ROWS, 0),
    "over what is in front": (lambda x: tf.reduce_max(_across(x), 0), Kind.ROWS, 0),
    "over both sides": (
        lambda x: tf.reduce_mean(tf.stack([_across(x)] * 2), [0, -2]),
        *(Kind.ROWS, 0),
    ),
    "over columns, kept": (
        lambda x: tf.reduce_sum(_across(x), 0, keepdims=True),
        *(Kind.ROWS, 0),
    ),
    "a product of columns": (lambda x: tf.reduce_prod(x, 1), Kind.ROWS, 0),
    "a product, n times": (
        lambda x: tf.reduce_prod(x * _count(x), 1),
        *(Kind.UNKNOWN, 0),
    ),
    "over examples": (lambda x: tf.reduce_mean(_across(x), -1), Kind.MEAN, 0),
    "over all of unknown rank": (
        lambda x: tf.reduce_sum(v1.placeholder_with_default(x, None)),
        *(Kind.MEAN, 1),
    ),
    "over one of unknown rank": (
        lambda x: tf.reduce_sum(v1.placeholder_with_default(x, None), 0),
        *(Kind.UNKNOWN, 0),
    ),
    "a mean of whole numbers": (
        lambda x: tf.reduce_mean(tf.cast(x, tf.int32), 0),
        *(Kind.STATISTIC, 0),
    ),
    "a mean of some": (lambda x: tf.reduce_mean(_some(x), 0), Kind.RATIO, 1),
    "half of the squares": (lambda x: tf.nn.l2_loss(x / _count(x)), Kind.MEAN, -1),
    "of biases": (lambda x: tf.raw_ops.BiasAddGrad(out_backprop=x), Kind.MEAN, 1),
    # Along axes.
    "convolved": (
        lambda x: tf.nn.conv2d(_images(x), tf.ones([2, 1, 1, 2]), 1, "VALID"),
        *(Kind.ROWS, 0),
    ),
    "convolved, n times": (
        lambda x: tf.nn.avg_pool2d(_images(x) * _count(x), [2, 1], 1, "VALID"),
        *(Kind.ROWS, 1),
    ),
    "the largest of patches, n times": (
        lambda x: tf.nn.max_pool2d(_images(x) * _count(x), [2, 1], 1, "VALID"),
        *(Kind.UNKNOWN, 0),
    ),
    "convolved in a batch": (
        lambda x: tf.nn.conv2d(
            tf.transpose(_images(x), [2, 0, 1, 3]), tf.ones([1, 1, 1, 1]), 1, "VALID"
        ),
        *(Kind.UNKNOWN, 0),
    ),
    "convolved with a sum": (
        lambda x: tf.nn.conv2d(
            *(_images(x), tf.reshape(tf.reduce_sum(x, 0), [3, 1, 1, 1]), 1, "VALID")
        ),
        *(Kind.UNKNOWN, 0),
    ),
    "softmax": (lambda x: tf.nn.softmax(x), Kind.ROWS, 0),
    "softmax over examples": (lambda x: tf.nn.softmax(_across(x)), Kind.UNKNOWN, 0),
    "softmax, n times": (lambda x: tf.nn.softmax(x * _count(x)), Kind.UNKNOWN, 0),
    "inverted": (lambda x: tf.linalg.inv(_matrices(x)), Kind.ROWS, 0),
    "inverted across": (
        lambda x: tf.linalg.inv(tf.transpose(_matrices(x), [1, 0, 2])[:, :3]),
        *(Kind.UNKNOWN, 0),
    ),
    "solved": (
        lambda x: tf.linalg.solve(_matrices(x), x[:, :, tf.newaxis]),
        *(Kind.ROWS, 0),
    ),
    "summed up": (lambda x: tf.cumsum(x * _count(x), 1), Kind.ROWS, 1),
    "summed up over examples": (lambda x: tf.cumsum(x), Kind.UNKNOWN, 0),
    "multiplied up": (lambda x: tf.math.cumprod(x, 1), Kind.ROWS, 0),
    "multiplied up, n times": (
        lambda x: tf.math.cumprod(x * _count(x), 1),
        *(Kind.UNKNOWN, 0),
    ),
    "rolled": (lambda x: tf.roll(x, 1, 1), Kind.ROWS, 0),
    "rolled over examples": (lambda x: tf.roll(x, [1, 1], [1, 0]), Kind.UNKNOWN, 0),
    "the place of the largest": (
        lambda x: tf.argmax(_across(x) * _count(x), 0),
        *(Kind.ROWS, 0),
    ),
    "the largest's example": (lambda x: tf.argmax(x, 0), Kind.UNKNOWN, 0),
    "normalized by what is known": (
        lambda x: _normalized(x, False)[0],
        *(Kind.ROWS, 0),
    ),
    "what it is normalized by": (
        lambda x: _normalized(x, False)[1],
        *(Kind.SAME, 0),
    ),
    # By shapes.
    "filled": (lambda x: tf.fill([2, _n(x)], 3.0), Kind.ROWS, 0),
    "filled with n": (lambda x: tf.fill([_n(x)], _count(x)), Kind.ROWS, 1),
    "filled with a mean": (
        lambda x: tf.fill([_n(x)], tf.reduce_mean(x)),
        *(Kind.UNKNOWN, 0),
    ),
    "as many rows as columns": (
        lambda x: tf.fill([_n(x), _n(x)], 3.0),
        *(Kind.UNKNOWN, 0),
    ),
    "filled with a mean, a few": (
        lambda x: tf.fill([tf.shape(x)[1]], tf.reduce_mean(x)),
        *(Kind.MEAN, 0),
    ),
    "random numbers for each": (lambda x: tf.random.normal([_n(x)]), Kind.ROWS, 0),
    "a few random numbers": (
        lambda x: tf.random.normal([tf.shape(x)[1]]),
        *(Kind.DRAWN, 0),
    ),
    "an op that nobody knows": (
        lambda x: tf.raw_ops.Unique(x=x[:, 0])[0],
        *(Kind.UNKNOWN, 0),
    ),
    "of the unknown": (lambda x: x + x[:1], Kind.UNKNOWN, 0),
}
RANDOM = ("random numbers for each", "a few random numbers")


@pytest.mark.parametrize("name", VALUES)
def test_what_is_told_is_true_of_parts(name: str) -> None:
    make, kind, power = VALUES[name]
    value = known(make)[1] if name in RANDOM else told(make)
    assert (value.kind, value.power) == (kind, power)


def test_random_numbers_for_each_are_no_counts() -> None:
    assert known(VALUES["random numbers for each"][0])[1].by_value
    assert not known(VALUES["filled"][0])[1].by_value


@pytest.mark.parametrize("k", range(3))
def test_normalizing_by_the_batch_mixes_its_examples(k: int) -> None:
    result, value = known(lambda x: _normalized(x, True)[k])
    assert value.kind is (Kind.MEAN if k else Kind.ROWS)
    assert value.mixed is result.op or result.op.inputs[0].op is value.mixed


def test_operands_that_are_combined_with_rows_are_of_the_whole_batch() -> None:
    made, value = known(lambda x: x / tf.reduce_sum(x, 0))
    (whole,) = value.wholes
    assert value.kind is Kind.ROWS and value.mixed is None
    assert (whole.op, whole.index) == (made.op, 1)


ONE_EACH, MANY = Value(Kind.ROWS), SAME


@pytest.mark.parametrize(
    ("shape", "value", "has_rows"),
    [
        *[([None], ONE_EACH, True), ([None, 2], ONE_EACH, True)],
        *[([3], ONE_EACH, False), ([], ONE_EACH, False), (None, ONE_EACH, False)],
        *[([None], SAME, False), ([None], ONE_EACH.replaced(axis=1), False)],
        *[([None], ONE_EACH.replaced(power=1), False)],
        *[([None], ONE_EACH.replaced(some="positive"), False)],
        *[([None], ONE_EACH.replaced(order=("behind", 2, ())), False)],
    ],
)
def test_python_is_believed_where_shapes_allow_a_row_for_each(
    shape: list[int | None] | None, value: Value, has_rows: bool
) -> None:
    with tf.Graph().as_default():
        result = v1.placeholder(tf.float32, shape)
    expected = Kind.ROWS if has_rows else Kind.UNKNOWN
    assert rows.believed(result, [SAME, value]).kind is expected
    assert rows.believed(result, [SAME]).kind is Kind.UNKNOWN


def test_parsed_texts_have_an_example_each() -> None:
    def text(x: tf.Tensor) -> tf.Tensor:
        return tf.strings.as_string(x[:, 0])

    number, size = tf.io.FixedLenFeature([], tf.float32), tf.io.VarLenFeature(tf.int64)
    features = {"a": number, "b": size}
    for parse, kind in (
        (lambda t: tf.io.decode_csv(t, [[0.0]])[0], Kind.ROWS),
        (lambda t: tf.io.parse_example(t, {"a": number})["a"], Kind.ROWS),
        (lambda t: tf.io.parse_example(t, features)["a"], Kind.ROWS),
        (lambda t: tf.io.parse_example(t, features)["b"].values, Kind.UNKNOWN),
    ):
        assert known(lambda x, parse=parse: parse(text(x)))[1].kind is kind
