# SPDX-License-Identifier: Apache-2.0
"""The axis of the examples is where it is said to be, after reshaping and its like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

from replicator.autodist.kinds import Kind
from tests.autodist.helpers import known, told
from tests.helpers import opaque

Make = Callable[[tf.Tensor], tf.Tensor]


def _count(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(_n(x), tf.float32)


def _n(x: tf.Tensor) -> tf.Tensor:
    return tf.shape(x)[0]


def _across(x: tf.Tensor) -> tf.Tensor:  # [3, n]
    return tf.transpose(x)


def _blocks(x: tf.Tensor) -> tf.Tensor:  # [2, n, 3]
    return tf.stack([x, -x])


def _twice(x: tf.Tensor) -> tf.Tensor:  # [2 n, 3]
    return tf.concat([x, 2.0 * x], 0)


def _unequal(x: tf.Tensor) -> tf.Tensor:  # [4 n]
    return tf.concat([x[:, 0], tf.reshape(x, [-1])], 0)


def _four(x: tf.Tensor) -> tf.Tensor:  # [n, 2, 2]
    return tf.reshape(tf.pad(x, [[0, 0], [0, 1]]), [-1, 2, 2])


def _unranked(x: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder_with_default(x, None)


def _unknown_times(x: tf.Tensor) -> tf.Tensor:  # [k, n, 3]
    return tf.tile(x[tf.newaxis], [opaque(2), 1, 1])


def _timed(x: tf.Tensor, make: Make) -> tf.Tensor:
    return make(_unknown_times(x))


def _some(x: tf.Tensor) -> tf.Tensor:
    return tf.boolean_mask(x, x[:, 0] > -0.5)


ROWS: dict[str, Make] = {
    # Reshaped.
    "in a matrix": lambda x: tf.reshape(x, [-1, 3, 1]),
    "as many": lambda x: tf.reshape(x, [_n(x), 1, 3]),
    "as many times three": lambda x: tf.reshape(x, [3 * _n(x)]),
    "all in one": lambda x: tf.reshape(x, [-1]),
    "behind an axis of one": lambda x: tf.reshape(x, [1, -1, 3]),
    "behind two": lambda x: tf.reshape(_blocks(x), [2, 1, -1, 3]),
    "two in one axis": lambda x: tf.reshape(_blocks(x), [-1, 3]),
    "two in one axis, twice": lambda x: tf.reshape(
        _blocks(tf.reshape(_blocks(x), [-1, 3])), [-1, 3]
    ),
    "in one row": lambda x: tf.reshape(x, [1, -1]),
    "the last two in one": lambda x: tf.reshape(_four(x), [-1, 4]),
    "the rest": lambda x: tf.reshape(x, [_n(x), -1]),
    "the rest in two": lambda x: tf.reshape(_four(x), [_n(x), 2, -1]),
    "of a part": lambda x: tf.reshape(_some(x), [-1, 3, 1]),
    "of a part, by its size": lambda x: tf.reshape(_some(x)[:, 0], [_n(_some(x))]),
    "like another": lambda x: tf.reshape(x * 2, tf.shape(x)),
    # More axes, fewer, in another order.
    "an axis in front": lambda x: x[tf.newaxis],
    "an axis behind": lambda x: tf.expand_dims(x, -1),
    "an axis before the last": lambda x: tf.expand_dims(_across(x), -2),
    "squeezed": lambda x: tf.squeeze(tf.reshape(x, [1, -1, 3, 1]), [0, 3]),
    "squeezed behind": lambda x: tf.squeeze(x[..., tf.newaxis], -1),
    "behind as many as before": lambda x: _timed(
        x, lambda t: tf.reshape(t, [tf.shape(t)[0], -1, 1, 3])
    ),
    "transposed": lambda x: tf.transpose(_blocks(x), [2, 0, 1]),
    "behind an axis that stays": lambda x: _timed(
        x, lambda t: tf.reshape(tf.tanh(t) * 2.0, [tf.shape(t)[0], _n(x), 3, 1])
    ),
    "behind an axis that was elsewhere": lambda x: _timed(
        x,
        lambda t: tf.reshape(
            tf.transpose(tf.transpose(t, [1, 0, 2]) * 2.0, [1, 0, 2]),
            [tf.shape(t)[0], -1, 1, 3],
        ),
    ),
    # Joined and split.
    "stacked": _blocks,
    "stacked last": lambda x: tf.stack([x, -x], -1),
    "stacked across": lambda x: tf.stack([_across(x), _across(-x)], 1),
    "unstacked": lambda x: tf.unstack(x, axis=1)[2],
    "unstacked in front": lambda x: tf.unstack(_across(x))[1],
    "side by side": lambda x: tf.concat([x, x * x], 1),
    "one after the other": _twice,
    "three after another": lambda x: tf.concat([_twice(x), _twice(-x)], 0),
    "three of one": lambda x: tf.concat([x, -x, x * x], 0),
    "split": lambda x: tf.split(x, 3, 1)[1],
    "split unevenly": lambda x: tf.split(x, [1, 2], -1)[1],
    "split again": lambda x: tf.split(_twice(x), 2)[1],
    "of three each, split again": lambda x: tf.split(_twice(tf.reshape(x, [-1])), 2)[1],
    "with ones and zeros": lambda x: (
        _twice(x) * tf.concat([tf.ones([_n(x), 1]), tf.zeros([_n(x), 1])], 0)
    ),
    "with ones and zeros of three each": lambda x: (
        _twice(tf.reshape(x, [-1]))
        * tf.concat([tf.ones([3 * _n(x)]), tf.fill([_n(x) * 3], 2.0)], 0)
    ),
    "with columns one after the other": lambda x: (
        tf.tile(x[:, 0], [2])
        + tf.concat([tf.squeeze(x[:, 1:2], 1), tf.reduce_sum(x, 1)], 0)
    ),
    # Slices.
    "columns": lambda x: x[:, 1:],
    "a column": lambda x: x[:, -1],
    "the last, wherever": lambda x: _four(x)[..., 0],
    "in the middle": lambda x: _blocks(x)[1, :, ::-1],
    "behind a new axis": lambda x: x[:, tf.newaxis, :2],
    "from the first to the last": lambda x: x[0 : _n(x)],
    "dots and a new axis": lambda x: _blocks(x)[..., tf.newaxis, 0],
    "cut": lambda x: tf.slice(x, [0, 1], [-1, 2]),
    "the gradient of a slice": lambda x: tf.gradients(tf.square(x[:, 1:]), x)[0],
    "the gradient of a column": lambda x: tf.gradients(tf.square(x[:, 1]), x)[0],
    # Repeated and padded.
    "tiled": lambda x: tf.tile(x, [1, 2]),
    "tiled behind": lambda x: tf.tile(x, [2, 1]),
    "tiled twice": lambda x: tf.tile(_twice(x), [3, 1]),
    "one row for each": lambda x: tf.tile([[1.0, 2.0]], [_n(x), 1]),
    "two rows for each": lambda x: tf.tile([[1.0], [2.0]], [_n(x), 1]),
    "one number for each": lambda x: tf.tile([[_count(x)]], [_n(x), 1]),
    "padded": lambda x: tf.pad(x, [[0, 0], [1, 2]]),
    "padded by ones": lambda x: tf.pad(x, [[0, 0], [1, 2]], constant_values=1),
    "padded by its mirror": lambda x: tf.pad(x, [[0, 0], [1, 2]], "REFLECT"),
    "times n, padded": lambda x: tf.pad(x * _count(x), [[0, 0], [1, 0]]),
    "broadcast in front": lambda x: tf.broadcast_to(x, [2, _n(x), 3]),
    "broadcast behind": lambda x: tf.broadcast_to(x[:, :1], [_n(x), 3]),
    "broadcast to as many": lambda x: tf.broadcast_to([1.0, 2.0], [_n(x), 2]),
    "reversed up to lengths": lambda x: tf.reverse_sequence(
        x, tf.cast(tf.clip_by_value(x[:, 0] + 2, 1, 3), tf.int32), 1, 0
    ),
}
UNKNOWN: dict[str, Make] = {
    "in rows of another size": lambda x: tf.reshape(x, [-1, 2]),
    "in three rows": lambda x: tf.reshape(x, [3, -1]),
    "with examples behind": lambda x: tf.reshape(x, [3, _n(x)]),
    "blocks of examples": lambda x: tf.reshape(_twice(x), [2, -1, 3]),
    "squares of n": lambda x: tf.reshape(_twice(x), [_n(x), _n(x), -1]),
    "mixed with what is in front": lambda x: tf.reshape(_blocks(x), [-1, 2]),
    "a shape that is computed": lambda x: tf.reshape(
        x, tf.cast(tf.reduce_mean(x, 0) * 0, tf.int32) + [-1, 3, 1]
    ),
    "behind as many as are unknown": lambda x: tf.reshape(
        _unknown_times(x), [3 * tf.shape(_unknown_times(x))[0], 1, -1]
    ),
    "squeezed wherever": lambda x: tf.squeeze(_unranked(x)),
    "unstacked in parts": lambda x: tf.unstack(tf.ensure_shape(x, [7, 3]))[1],
    "stacked with others": lambda x: tf.stack([x, tf.ones_like(x) * _count(x)]),
    "stacked with some": lambda x: tf.concat([_some(x), x], 0),
    "stacked with a constant": lambda x: tf.concat([x, tf.ones([2, 3])], 0),
    "in parts of another size": lambda x: tf.split(tf.tile(x, [6, 1]), 3)[1],
    "split in two that are not equally long": lambda x: tf.split(_unequal(x), 2)[0],
    "unequal parts with equal ones": lambda x: (
        _unequal(x) + tf.concat([tf.reshape(x[:, :2], [-1])] * 2, 0)
    ),
    "unequal parts in another order": lambda x: (
        _unequal(x) + tf.concat([tf.reshape(x, [-1]), x[:, 0]], 0)
    ),
    "behind three times as many": lambda x: _timed(
        x, lambda t: tf.reshape(t, [3 * tf.shape(t)[0], _n(x)])
    ),
    "behind another unknown size": lambda x: tf.reshape(
        _unknown_times(x), [opaque(6), _n(x)]
    ),
    "split in two": lambda x: tf.split(tf.reshape(x, [3, -1]), 3)[1],
    "the first": lambda x: x[0],
    "all but one": lambda x: x[1:],
    "all but the last": lambda x: x[:-1],
    "every other": lambda x: x[::2],
    "backwards": lambda x: x[::-1],
    "as many of twice": lambda x: _twice(x)[: _n(x)],
    "as many of more": lambda x: tf.pad(x, [[0, 1], [0, 0]])[: _n(x)],
    "from one on, cut": lambda x: tf.slice(x, [1, 0], [-1, 2]),
    "three, cut": lambda x: tf.slice(x, [0, 0], [3, 2]),
    "tiled by n": lambda x: tf.tile(x, [_n(x), 1]),
    "padded behind": lambda x: tf.pad(x, [[0, 1], [0, 0]]),
    "times n, padded by ones": lambda x: tf.pad(
        x * _count(x), [[0, 0], [1, 0]], constant_values=1
    ),
    "reversed": lambda x: tf.reverse_sequence(
        x, tf.cast(tf.reduce_max(x, 0), tf.int32), 0, 1
    ),
    "reversed in each other's order": lambda x: tf.reverse_sequence(
        x, tf.cast(x[:, 0], tf.int32), seq_axis=0, batch_axis=1
    ),
    "as many as there may be": lambda x: tf.broadcast_to(tf.ones([7, 3]), tf.shape(x)),
    "the gradient of all but one": lambda x: tf.raw_ops.StridedSliceGrad(
        shape=tf.shape(x),
        begin=[1, 0],
        end=[0, 0],
        strides=[1, 1],
        dy=x,
        begin_mask=2,
        end_mask=3,
    ),
    "the gradient of the first": lambda x: tf.gradients(tf.square(x[:1]), x)[0],
}


@pytest.mark.parametrize("name", ROWS)
def test_the_examples_are_where_they_are_said_to_be(name: str) -> None:
    assert told(ROWS[name]).kind is Kind.ROWS


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_said_where_examples_are_mixed(name: str) -> None:
    assert known(UNKNOWN[name])[1].kind is Kind.UNKNOWN


@pytest.mark.parametrize("statistic", [tf.reduce_mean, tf.reduce_max])
def test_rows_of_a_statistic_depend_on_all_examples(statistic: Make) -> None:
    for make in (
        lambda x: tf.tile(statistic(x, 0, keepdims=True), [_n(x), 1]),
        lambda x: tf.broadcast_to(statistic(x, 0), [_n(x), 3]),
    ):
        tensor, value = known(make)
        assert value.kind is Kind.ROWS and value.mixed is tensor.op
    assert known(lambda x: tf.tile([tf.reduce_sum(x)], [_n(x)]))[1].mixed is None


def test_tiles_of_a_mean_that_are_as_many_on_all_replicas_are_a_mean() -> None:
    assert told(lambda x: tf.tile(tf.reduce_mean(x, 0), [2])).kind is Kind.MEAN
    assert known(lambda x: tf.tile(tf.reduce_max(x, 0), [2]))[1].kind is Kind.UNKNOWN


def test_places_of_examples_stay_places() -> None:
    def picked(places: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]) -> Make:
        def make(x: tf.Tensor) -> tf.Tensor:
            columns = tf.cast(x[:, 0] > 0, tf.int32)
            return tf.gather_nd(x, places(tf.range(_n(x)), columns))

        return make

    for places in (
        lambda n, k: tf.expand_dims(n, 1),
        lambda n, k: tf.reshape(n, [-1, 1]),
        lambda n, k: tf.stack([n, k], 1),
        lambda n, k: tf.squeeze(tf.expand_dims(tf.stack([n, k], -1), 1), 1),
        lambda n, k: tf.concat([tf.expand_dims(n, 1), tf.expand_dims(k, 1)], 1),
    ):
        assert told(picked(places)).kind is Kind.ROWS
    for places in (
        lambda n, k: tf.expand_dims(tf.concat([n, n], 0), 1),
        lambda n, k: tf.stack([n, n], 0)[:, :1],
    ):
        assert told(picked(places)).kind is Kind.UNKNOWN
