# SPDX-License-Identifier: Apache-2.0
"""Only what fetches need runs, and reads come before updates as on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import strategy
from replicator.autodist import program
from tests.autodist import helpers
from tests.autodist.test_session import scope

v1 = tf.compat.v1
HERE = r"test_program\.py:\d+ in"
STRATEGIES = ("mirrored", strategy.PS(), strategy.PartitionedPS())


def _types(ops: Any) -> set[str]:
    return {op.type for op in ops}


def test_only_what_fetches_need_is_found():
    with scope() as autodist:
        x = v1.placeholder(tf.float32, [None], "x")
        w, other = tf.Variable(1.0, name="w"), tf.Variable(2.0, name="other")
        with tf.control_dependencies([other.assign_add(1.0)]):
            product = w * x
        _ = tf.sqrt(product)
        needed = program.needed([product.op], [x])
        assert [one.op.name for one in needed.handles] == ["other", "w"]
        assert x.op not in needed.ops and product.op in needed.ops
        assert {"AssignAddVariableOp", "Mul"} <= _types(needed.ops)
        assert "Sqrt" not in _types(needed.ops)
        assert not program.needed([x.op], [x]).ops  # what is fed is fetched
        assert autodist.replicator.num_replicas == 3


def test_what_is_fed_cuts_off_what_it_would_be_computed_from():
    with scope():
        pulled = v1.data.make_one_shot_iterator(tf.data.Dataset.range(9)).get_next()
        doubled = pulled * 2
        needed = program.needed([(doubled + 1).op], [])
        assert [op.type for op in needed.resources] == ["OneShotIterator"]
        needed = program.needed([(doubled + 1).op], [doubled])
        assert not needed.resources and "IteratorGetNext" not in _types(needed.ops)


def test_queues_and_tables_are_resources_but_tensor_lists_are_not():
    with scope():
        keys = tf.lookup.KeyValueTensorInitializer([1], [2])
        looked_up = tf.lookup.StaticHashTable(keys, 0).lookup(tf.constant([1]))
        pulled = tf.queue.FIFOQueue(3, [tf.int32]).dequeue()
        array = tf.TensorArray(tf.int32, 1).write(0, 1).stack()
        targets = [looked_up.op, pulled.op, array.op]
        found = program.needed(targets, []).resources
        assert {op.type for op in found} == {"HashTableV2", "FIFOQueueV2"}


def _reference_variable() -> tf.Operation:
    return tf.raw_ops.VariableV2(shape=[2], dtype=tf.float32).op


def _conditional() -> tf.Operation:
    return tf.raw_ops.Switch(data=tf.constant(1.0), pred=tf.constant(True))[0].op


def _loop() -> tf.Operation:
    return tf.raw_ops.Enter(data=tf.constant(1.0), frame_name="loop").op


def _collective() -> tf.Operation:
    return tf.raw_ops.CollectiveReduce(
        input=tf.constant([1.0]),
        **{"group_size": 2, "group_key": 1, "instance_key": 1},
        **{"merge_op": "Add", "final_op": "Id", "subdiv_offsets": [0]},
    ).op


REFUSED: dict[Callable[[], tf.Operation], str] = {
    _reference_variable: "VariableV2 .*holds state.*Fix: use variables created in",
    _conditional: "Switch .*of TensorFlow 1.*Fix: build it in autodist.scope",
    _loop: "Enter .*of TensorFlow 1.*Fix: build it in autodist.scope",
    _collective: "CollectiveReduce .*communicates by itself.*Fix: use variables",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_cannot_run_on_replicas_is_refused_by_name_and_line(make):
    with scope() as autodist:
        x = v1.placeholder(tf.float32, [None])
        op = make()
        session = autodist.create_distributed_session()
        with pytest.raises(
            replicator.UnsupportedError,
            match=f"(?s){REFUSED[make]}".replace("Fix", f"{HERE} {make.__name__}.*Fix"),
        ):
            session.run(op)
        assert session.run(x * 2, {x: [3.0]}).tolist() == [6.0]  # the rest runs


def test_all_results_of_an_op_are_fed_or_none():
    def build():
        one, two = tf.unstack(tf.constant([[1.0, 2.0], [3.0, 4.0]]))
        return one, two, one + two

    with scope() as autodist:
        one, two, total = build()
        session = autodist.create_distributed_session()
        with pytest.raises(
            replicator.ArgumentError,
            match=rf"(?s)unstack:1 is not.*created at .*{HERE} build.*fed at .*Fix",
        ):
            session.run(total, {one: [5.0, 6.0]})
        given = {one: [5.0, 6.0], two: [1.0, 1.0]}
        assert session.run(total, given).tolist() == [6, 7]
        assert session.run(total).tolist() == [4, 6]
        assert session.run(one, {one: [5.0, 6.0]}).tolist() == [5, 6]


def test_what_is_fed_may_be_computed_otherwise():
    def run(begin):
        x = v1.placeholder(tf.float32, [None])
        y = x * 2
        total = tf.reduce_sum(y)
        session = begin()
        given = {y: [1.0, 2.0, 6.0]}
        values = [session.run(total, {x: [1.0, 2.0]}), session.run(total, given)]
        return [*values, *session.run([total, y], given), session.run(y, {y: [3.0]})]

    assert helpers.in_sessions(run)[:2] == [6, 9]


def _evaluated(make: Any) -> Any:
    """Returns an initial value, and ops on a variable of it."""
    w = v1.get_variable("w", initializer=np.float32([1, 2, 3]), use_resource=True)
    return w, make(w)


UPDATES: dict[str, Callable[[Any], Any]] = {
    "added": lambda w: w.assign_add([1.0, 1.0, 1.0]),
    "computed of itself": lambda w: w.assign(w + 1.0),
    "rows": lambda w: w.scatter_add(tf.IndexedSlices([1.0, 1.0, 1.0], [0, 1, 2])),
    "trained": lambda w: v1.train.GradientDescentOptimizer(1.0).minimize(
        -tf.reduce_sum(w)
    ),
    "momentum": lambda w: v1.train.MomentumOptimizer(1.0, 0.0).minimize(
        -tf.reduce_sum(w)
    ),
}


@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("plan", STRATEGIES, ids=["mirrored", "PS", "PartitionedPS"])
def test_a_read_beside_an_update_is_of_the_value_before(name, num_replicas, plan):
    with scope(num_replicas, plan) as autodist:
        w, update = _evaluated(UPDATES[name])
        fetches = [w, w * 2.0, tf.gather(w, [2, 0]), getattr(update, "op", update)]
        session = autodist.create_distributed_session()
        for before in (np.array([1, 2, 3]), np.array([2, 3, 4])):
            value, twice, rows, _ = session.run(fetches)
            assert value.tolist() == before.tolist()
            assert twice.tolist() == (2 * before).tolist()
            assert rows.tolist() == before[[2, 0]].tolist()
        assert session.run(w).tolist() == [3, 4, 5]


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("plan", STRATEGIES, ids=["mirrored", "PS", "PartitionedPS"])
def test_a_read_that_waits_for_an_update_stays_behind_it(num_replicas, plan):
    def update(w):
        added = w.assign_add([1.0, 1.0, 1.0])
        with tf.control_dependencies([added]):
            after = w.read_value(), tf.gather(w, [2, 0]), w * 2.0
        return added, after

    with scope(num_replicas, plan) as autodist:
        w, (added, after) = _evaluated(update)
        before = w.read_value()
        session = autodist.create_distributed_session()
        found = session.run([before, added, *after])
    expected = [[1, 2, 3], [2, 3, 4], [2, 3, 4], [4, 2], [4, 6, 8]]
    assert [one.tolist() for one in found] == expected


def test_a_new_value_is_no_update_and_its_readers_are_free():
    with scope():
        w = tf.Variable(1.0)
        read = w.read_value()
        new, own = w.assign(3.0), w.assign(w + 1.0)
        ops = program.needed([read.op, new.op, own.op], []).ops
        writes = [op for op in ops if op.type == "AssignVariableOp"]
        updates = [op for op in writes if program.is_update(op, ops)]
        assert len(writes) == 2 and len(updates) == 1
        (found,) = program.reads_first(ops).items()
        assert found[0] is updates[0] and len(found[1]) > 1


def test_evaluations_are_left_alone_by_training():
    def run(begin):
        x, y = (v1.placeholder(tf.float32, [None, 2], name) for name in "xy")
        rows = tf.data.Dataset.from_tensor_slices(np.arange(6, dtype=np.float32))
        pulled = v1.data.make_one_shot_iterator(rows.batch(2)).get_next()
        w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
        model = functools.partial(tf.matmul, b=w)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(
            tf.reduce_mean(model(x) ** 2)
        )
        given, loss = tf.reduce_mean(model(y)), tf.reduce_sum(model(pulled[None]))
        session = begin()
        for _ in range(3):
            session.run(train, {x: np.ones([5, 2])})
        fetches = [session.run(loss), session.run(given, {y: np.ones([3, 2])})]
        return [*fetches, session.run(pulled)]

    *_, pulled = helpers.in_sessions(run)
    assert pulled.tolist() == [2, 3]
