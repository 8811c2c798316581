# SPDX-License-Identifier: Apache-2.0
"""Iterators with prefetching and restarts yield the dataset's elements."""

from __future__ import annotations

import pytest
import tensorflow as tf

from replicator.inputs import iterators


def _read(iterator: tf.data.Iterator, count: int) -> list[int]:
    return [int(next(iterator)) for _ in range(count)]


@pytest.mark.parametrize("device", [None, "/device:CPU:0"])
@pytest.mark.parametrize("per_step", [1, 3])
def test_what_is_read_ahead_is_what_was_there(
    device: str | None, per_step: int
) -> None:
    dataset = tf.data.Dataset.range(7)
    ahead = iterators.prefetched(dataset, device, per_step)
    assert list(ahead.as_numpy_iterator()) == list(range(7))
    assert ahead.element_spec == dataset.element_spec


@pytest.mark.parametrize("chosen", [None, True, False])
def test_the_autotuner_is_off_unless_the_user_has_chosen(chosen: bool | None) -> None:
    dataset = tf.data.Dataset.range(3)
    if chosen is not None:
        options = tf.data.Options()
        options.autotune.enabled = chosen
        dataset = dataset.with_options(options)
    actual = iterators.without_autotuner(dataset).options().autotune.enabled
    assert actual is bool(chosen)


def test_other_options_of_the_user_stay() -> None:
    options = tf.data.Options()
    options.deterministic = False
    dataset = tf.data.Dataset.range(3).with_options(options)
    assert iterators.prefetched(dataset, None, 1).options().deterministic is False


def test_an_iterator_starts_over_also_where_a_function_has_captured_it() -> None:
    dataset = tf.data.Dataset.range(5)
    iterator = iterators.make(dataset)
    read = tf.function(lambda: next(iterator))
    assert [int(read()), int(read())] == [0, 1] and _read(iterator, 1) == [2]
    iterators.restart(dataset, iterator)
    assert int(read()) == 0 and _read(iterator, 4) == [1, 2, 3, 4]
    with pytest.raises(StopIteration):
        next(iterator)
    iterators.restart(dataset, iterator)
    assert int(read()) == 0


def test_in_a_graph_sessions_initialize_it_with_their_tables() -> None:
    with tf.Graph().as_default():
        iterator = iterators.make(tf.data.Dataset.range(3))
        element = iterator.get_next()
        with tf.compat.v1.Session() as session:
            for _ in range(2):
                session.run(tf.compat.v1.tables_initializer())
                assert [session.run(element) for _ in range(3)] == [0, 1, 2]
