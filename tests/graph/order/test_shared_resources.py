# SPDX-License-Identifier: Apache-2.0
"""Replicas that share an iterator or a table use it in the same order in each run."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from tests import helpers

_RUNS = 10  # by chance, three replicas are in order in one of six


@pytest.mark.parametrize("build", ["trace", "clone"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_replicas_pull_from_one_iterator_in_turns(nested: bool, build: str) -> None:
    repl = helpers.make(3, build=build)
    iterator = iter(tf.data.Dataset.range(1000))
    function = tf.function(lambda: next(iterator))

    def step() -> tf.Tensor:
        if not nested:
            return next(iterator)
        return tf.cond(tf.random.uniform([]) < 2.0, function, function)

    for run in range(_RUNS):
        pulled = [int(x) for x in repl.run(step)]
        assert pulled == [3 * run, 3 * run + 1, 3 * run + 2]


def test_in_a_loop_inside_the_graph_too() -> None:
    repl = helpers.make(3)
    iterator = iter(tf.data.Dataset.range(1000))
    pulled = repl.run(lambda: next(iterator), steps_per_call=_RUNS)
    assert tf.stack(pulled, 1).numpy().ravel().tolist() == list(range(3 * _RUNS))


def test_in_a_session_too() -> None:
    repl = helpers.make(3)
    with tf.Graph().as_default(), helpers.session() as session:
        dataset = tf.compat.v1.data.make_initializable_iterator(
            tf.data.Dataset.range(1000)
        )
        fetches = repl.run(lambda: dataset.get_next())
        session.run(dataset.initializer)
        for run in range(_RUNS):
            pulled = [int(x) for x in session.run(fetches)]
            assert pulled == [3 * run, 3 * run + 1, 3 * run + 2]


def test_the_last_replica_writes_a_table_last() -> None:
    repl = helpers.make(3)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, -1)
    key = tf.constant(0, tf.int64)

    def step() -> tf.Tensor:
        table.insert(key, tf.constant(repl.replica_id, tf.int64))
        return table.lookup(key)

    for _ in range(_RUNS):
        assert [int(x) for x in repl.run(step)] == [0, 1, 2]
        assert int(table.lookup(key)) == 2


@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_turns_follow_communication(variables: str) -> None:
    """Replica 1 reads before a sum that replica 0's write waits for."""
    repl = helpers.make(2, variables=variables)
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    key = tf.constant(0, tf.int64)
    with repl.context():
        variable = tf.Variable(0.0)

    def step() -> Any:
        if repl.replica_id == 0:
            total = repl.all_reduce(tf.constant(1.0))
            table.insert(key, total)
        else:
            total = repl.all_reduce(table.lookup(key))
        variable.assign(total)
        return total

    totals = [[float(x) for x in repl.run(step)] for _ in range(_RUNS)]
    assert totals == [[float(n), float(n)] for n in range(1, _RUNS + 1)]
    assert variable.numpy() == _RUNS


def test_a_queue_may_wait_for_another_replica() -> None:
    repl = helpers.make(2)
    queue = tf.queue.FIFOQueue(1, [tf.float32], shapes=[[]])
    iterator = iter(tf.data.Dataset.range(100))

    def step() -> Any:
        pulled = next(iterator)
        if repl.replica_id == 0:
            return queue.dequeue(), pulled
        queue.enqueue(5.0)
        return tf.constant(0.0), pulled

    received, _ = repl.run(step)
    assert float(received[0]) == 5.0
