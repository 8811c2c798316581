# SPDX-License-Identifier: Apache-2.0
"""Elements are whole batches, wherever sessions and functions pull them from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests.autodist import helpers
from tests.autodist.test_session import scope

v1 = tf.compat.v1
X = np.random.default_rng(0).normal(size=[10, 3]).astype(np.float32)
HERE = r"test_iterators\.py:\d+ in"


def _iterator(batch: int = 4, **options: Any) -> Any:
    data = tf.data.Dataset.from_tensor_slices(X).batch(batch, **options)
    return v1.data.make_one_shot_iterator(data)


WAYS: dict[str, Callable[[Any], tf.Tensor]] = {
    "plain": lambda train: _iterator().get_next(),
    "conditional": lambda train: v1.cond(
        train, _iterator().get_next, _iterator(3).get_next
    ),
    "function": lambda train: tf.function(_iterator().get_next)(),
    "function in a function": lambda train: tf.function(
        lambda iterator: tf.function(iterator.get_next)()
    )(_iterator()),
    "of static size": lambda train: _iterator(drop_remainder=True).get_next(),
}


@pytest.mark.battery(3)
@pytest.mark.parametrize("way", WAYS)
def test_elements_are_those_of_one_device_wherever_they_are_pulled(way):
    def run(begin):
        x = WAYS[way](v1.placeholder_with_default(True, []))
        w = v1.get_variable("w", [3, 1], initializer=v1.ones_initializer())
        loss = tf.reduce_mean((x @ w - 1.0) ** 2)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session = begin()
        steps = [session.run([x, loss, train])[:2] for _ in range(2)]
        return [*steps, session.run(w)]

    _, (rows, _), _ = helpers.in_sessions(run)
    np.testing.assert_array_equal(rows, X[4:8])


def test_an_iterator_ends_as_on_one_device():
    for count in (1, 2, 3):
        with scope(count) as autodist:
            x = _iterator(3).get_next()
            total = tf.reduce_sum(x, 0)
            session = autodist.create_distributed_session()
            for begin in (0, 3, 6, 9):  # the last has one row
                rows = X[begin : begin + 3]
                np.testing.assert_allclose(session.run(total), rows.sum(0), rtol=1e-5)
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(total)


def test_an_element_of_few_rows_or_without_any_is_an_element():
    def run(begin):
        data = tf.data.Dataset.from_generator(
            lambda: (X[:n] for n in (2, 0, 1, 5)),
            output_signature=tf.TensorSpec([None, 3]),
        )
        iterator = v1.data.make_initializable_iterator(data)
        x = iterator.get_next()
        fetches = x * 2, tf.reduce_sum(x, 0), tf.shape(x)[0]
        session = begin()
        session.run(iterator.initializer)
        return [session.run(fetches) for _ in range(4)]

    helpers.in_sessions(run)


def test_a_scalar_element_is_every_replicas():
    def run(begin):
        x = v1.placeholder(tf.float32, [None])
        data = tf.data.Dataset.from_tensor_slices(np.float32([1, 2, 3]))
        rate = v1.data.make_one_shot_iterator(data).get_next()
        session, rows = begin(), x * rate
        return [session.run(rows, {x: X[:5, 0]}) for _ in range(3)]

    helpers.in_sessions(run)


def test_a_component_of_another_length_is_given_a_first_axis_of_one():
    """As the error says that a component without one has."""

    def run(begin):
        specs = (tf.TensorSpec([None, 3]), tf.TensorSpec([1, None, 3]))
        data = tf.data.Dataset.from_generator(
            lambda: ((X[:n], X[None, n:]) for n in (4, 7, 1)), output_signature=specs
        )
        x, others = v1.data.make_one_shot_iterator(data).get_next()
        likeness = x @ tf.transpose(others[0])
        fetches, session = [likeness, tf.reduce_mean(likeness)], begin()
        return [session.run(fetches) for _ in range(3)]

    helpers.in_sessions(run)


def test_iterators_begin_anew_with_what_they_are_fed():
    def run(begin):
        rows = v1.placeholder(tf.float32, [None])
        data = tf.data.Dataset.from_tensor_slices(rows).batch(4)
        iterator = v1.data.make_initializable_iterator(data)
        mean, session, found = tf.reduce_mean(iterator.get_next()), begin(), []
        for values in ([1, 2, 6], [3, 5, 7, 9]):
            session.run(iterator.initializer, {rows: values})
            found.append(session.run(mean))
        return found

    assert helpers.in_sessions(run) == [3, 6]


def test_an_iterator_of_several_datasets_is_begun_by_the_user():
    def run(begin):
        one, two = (tf.data.Dataset.from_tensor_slices(X * k).batch(4) for k in (1, 2))
        iterator = v1.data.Iterator.from_structure(
            v1.data.get_output_types(one), v1.data.get_output_shapes(one)
        )
        starts = iterator.make_initializer(one), iterator.make_initializer(two)
        x, session, found = iterator.get_next(), begin(), []
        for start in starts:
            session.run(start)
            found += [session.run(x) for _ in range(2)]
        return found

    helpers.in_sessions(run)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_a_handle_says_which_iterator_is_pulled_from(num_replicas):
    with scope(num_replicas) as autodist:
        first = tf.data.Dataset.range(12).batch(4)
        second = tf.data.Dataset.range(100, 112).batch(4)
        iterators = [
            v1.data.make_initializable_iterator(first),
            v1.data.make_one_shot_iterator(second),
        ]
        handle = v1.placeholder(tf.string, [])
        facts = v1.data.get_output_types(first), v1.data.get_output_shapes(first)
        element = v1.data.Iterator.from_string_handle(handle, *facts).get_next()
        total = tf.reduce_sum(element)
        session = autodist.create_distributed_session()
        session.run(iterators[0].initializer)
        handles = session.run([one.string_handle() for one in iterators])
        for begin, k in ((0, 0), (100, 1), (4, 0), (104, 1)):
            found = session.run([total, element], {handle: handles[k]})
            rows = np.arange(begin, begin + 4)
            np.testing.assert_array_equal(found[1], rows)
            assert found[0] == rows.sum()


@pytest.mark.parametrize("way", ["plain", "conditional"])
def test_queues_give_whole_batches(way):
    def run(begin):
        queue = tf.queue.FIFOQueue(20, [tf.float32], [[3]])
        rows = v1.placeholder(tf.float32, [None, 3])
        put, size = queue.enqueue_many([rows]), queue.size()
        x = queue.dequeue_many(4)
        if way == "conditional":
            test = v1.placeholder_with_default(True, [])
            x = v1.cond(
                *(test, lambda: queue.dequeue_many(4), lambda: queue.dequeue_many(2))
            )
        session = begin()
        session.run(put, {rows: X})
        return [
            *(session.run([x, tf.reduce_sum(x)]) for _ in range(2)),
            session.run(size),
        ]

    helpers.in_sessions(run)


def test_optional_elements_are_refused():
    with scope(2) as autodist:
        has_value = _iterator().get_next_as_optional().has_value()
        session = autodist.create_distributed_session()
        with pytest.raises(
            replicator.UnsupportedError, match=rf"(?s)AsOptional.*{HERE}.*next"
        ):
            session.run(has_value)


def test_a_dataset_that_uses_a_variable_is_refused():
    with scope(2) as autodist:
        w = v1.get_variable("w", initializer=np.float32([3, 4]), use_resource=True)
        data = tf.data.Dataset.range(4).map(lambda k: w[k % 2])
        iterator = v1.data.make_initializable_iterator(data)
        x = iterator.get_next()
        with pytest.raises(
            replicator.UnsupportedError, match=rf"(?s)MapDataset.*variable.*{HERE}.*Fix"
        ):
            session = autodist.create_distributed_session()
            session.run(iterator.initializer)
            session.run(x)


@pytest.mark.parametrize("where", ["function", "branch", "argument"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_functions_pull_what_one_device_pulls(where, num_replicas):
    iterator = iter(tf.data.Dataset.from_tensor_slices(X).batch(2))

    @helpers.make(num_replicas).function
    def total(x, pulled=iterator):
        if where == "branch":
            return tf.cond(
                tf.shape(X)[0] > 2, lambda: tf.reduce_sum(next(iterator)), lambda: 0.0
            )
        return tf.reduce_sum(next(pulled))

    for k in range(2):
        sums = total(X, iterator) if where == "argument" else total(X)
        np.testing.assert_allclose(sums, X[2 * k : 2 * k + 2].sum(), rtol=1e-5)


def test_functions_may_have_datasets_of_their_own():
    data = tf.data.Dataset.from_tensor_slices(X).batch(4)

    @helpers.make(2).function
    def total(x):
        result = tf.reduce_sum(next(iter(data)))
        for rows in data:
            result += tf.reduce_sum(rows)
        return result + tf.reduce_mean(x)

    expected = X[:4].sum() + X.sum() + X.mean()
    np.testing.assert_allclose(total(X), expected, rtol=1e-5)


def test_loops_over_an_iterator_of_the_function_leave_it_split(caplog):
    @helpers.make(2).function
    def scaled(x):
        iterator = iter(tf.data.Dataset.range(1, 4))
        for _ in tf.range(3):
            x *= tf.cast(next(iterator), tf.float32)
        return tf.reduce_mean(x)

    np.testing.assert_allclose(scaled(X), X.mean() * 6, rtol=1e-5)
    assert not caplog.text
