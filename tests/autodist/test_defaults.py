# SPDX-License-Identifier: Apache-2.0
"""Defaults of unfed placeholders count once, as on one device, or are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests.autodist import helpers

v1 = tf.compat.v1
X = np.arange(1, 5, dtype=np.float32)


def _run(
    make: Callable[..., tf.Tensor], num_replicas: int | None, fed: bool = True
) -> tuple[float, float]:
    """Returns a loss, and a variable that was trained by it; None: plain TensorFlow."""
    autodist = helpers.make(num_replicas) if num_replicas else None
    scope = autodist.scope() if autodist else contextlib.nullcontext()
    with tf.Graph().as_default(), scope:
        w = v1.get_variable("w", initializer=1.0, use_resource=True)
        x = v1.placeholder(tf.float32, [None])
        loss = make(x, w)
        train_op = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session = autodist.create_distributed_session() if autodist else v1.Session()
        with session:
            if autodist is None:
                session.run(v1.global_variables_initializer())
            value, _ = session.run([loss, train_op], {x: X} if fed else {})
            return float(value), float(session.run(w))


def _default(value: Any) -> tf.Tensor:
    return v1.placeholder_with_default(value, [None])


RIGHT: dict[str, tuple[Callable[..., tf.Tensor], bool]] = {
    "a row per example": (lambda x, w: tf.reduce_sum(x * w * _default(X)), True),
    "a sum of its own": (
        lambda x, w: tf.reduce_sum(x * w) + tf.reduce_sum(_default(X) * w),
        True,
    ),
    "one row, repeated": (
        lambda x, w: tf.reduce_mean((x * w - 1) ** 2 * _default([2.0])),
        True,
    ),
    "alone, a sum": (lambda x, w: tf.reduce_sum(_default(X) * w), False),
    "alone, a mean": (lambda x, w: tf.reduce_mean(_default(X) * w), False),
    "known first size": (
        lambda x, w: (
            tf.reduce_mean(x * w)
            + w * tf.reduce_sum(v1.placeholder_with_default(X[:3], [3]))
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_defaults_count_as_on_one_device(name: str, num_replicas: int) -> None:
    make, fed = RIGHT[name]
    np.testing.assert_allclose(
        _run(make, num_replicas, fed), _run(make, None, fed), rtol=1e-5
    )


REFUSED: dict[str, tuple[Callable[..., tf.Tensor], str]] = {
    "more rows": (
        lambda x, w: (
            tf.reduce_sum(x * w) + tf.reduce_sum(_default(np.ones(5, "f")) * w)
        ),
        r"default.*differ.*\(5,\)",
    ),
    "one row, not repeated": (
        lambda x, w: tf.reduce_sum(x * w) + tf.reduce_sum(_default([1.0]) * w),
        r"default.*differ.*\(1,\)",
    ),
    "one row, counted": (
        lambda x, w: (
            tf.reduce_sum(x * w * (one := _default([1.0]))) / tf.reduce_sum(one)
        ),
        r"default.*differ.*\(1,\)",
    ),
    "unknown": (
        lambda x, w: tf.reduce_sum(x * w) + tf.reduce_sum(_default(X * w) * w),
        "unknown before the session runs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_defaults_that_would_count_once_per_replica_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(errors.ArgumentError, match=f"(?s){message}.*created at.*Fix: "):
        _run(make, 2)


def test_defaults_that_a_run_does_not_need_are_of_no_matter() -> None:
    def make(x: tf.Tensor, w: Any) -> tf.Tensor:
        tf.reduce_sum(_default(np.ones(7, "f")) * w)
        return tf.reduce_sum(x * w)

    assert _run(make, 2) == _run(make, None)


def test_beside_the_elements_of_an_iterator_each_replica_has_the_whole() -> None:
    autodist = helpers.make(2)
    with tf.Graph().as_default(), autodist.scope():
        dataset = tf.data.Dataset.from_tensor_slices(np.arange(8.0)).batch(4)
        element = v1.data.make_one_shot_iterator(dataset).get_next()
        scale = v1.placeholder_with_default(np.arange(4.0), [None])
        with autodist.create_distributed_session() as session:
            values = session.run(element * scale)
    np.testing.assert_array_equal(values, np.arange(8.0) * [*range(4), *range(4)])


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_a_default_with_a_row_for_each_example_is_split(num_replicas: int) -> None:
    autodist = helpers.make(num_replicas)
    with tf.Graph().as_default(), autodist.scope():
        x = v1.placeholder(tf.float32, [None])
        weights = v1.placeholder_with_default(tf.constant([1.0, 2.0, 3.0, 4.0]), [None])
        total = tf.reduce_sum(x * weights)
        with autodist.create_distributed_session() as session:
            assert session.run(total, {x: [1.0, 2.0, 3.0, 4.0]}) == 30
            assert session.run(total, {x: [1.0, 2.0], weights: [1.0, 1.0]}) == 3


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_is_fed_in_place_of_a_default_is_assigned(num_replicas: int) -> None:
    with tf.Graph().as_default(), helpers.make(num_replicas).scope() as autodist:
        rows = _default(X)
        v = v1.Variable(tf.zeros([1]), validate_shape=False, trainable=False)
        write = v1.assign(v, rows, validate_shape=False)
        session = autodist.create_distributed_session()
        for feed, expected in (({}, X), ({rows: X[:3] + 1}, X[:3] + 1)):
            session.run(write, feed)
            np.testing.assert_array_equal(session.run(v), expected)
