# SPDX-License-Identifier: Apache-2.0
"""A session's fetches and feeds behave as on one device."""

from __future__ import annotations

import collections
import contextlib

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator._tf import graphs
from replicator.autodist.session import configured
from tests.autodist import helpers

v1 = tf.compat.v1
X = np.arange(14, dtype=np.float32).reshape(7, 2)


@contextlib.contextmanager
def scope(num_replicas=3, strategy="mirrored"):
    """Yields an AutoDist whose scope, in a tf.Graph, the block runs in."""
    autodist = helpers.make(num_replicas, strategy)
    with tf.Graph().as_default(), autodist.scope():
        yield autodist


def both(fetch, feed=X, num_replicas=3):
    """Returns the fetches on replicas, and on one device by plain TensorFlow."""
    values = []
    for place in (scope(num_replicas), tf.Graph().as_default()):
        with place as autodist:
            x = v1.placeholder(tf.float32, [None, 2], "x")
            fetches = fetch(x)
            if isinstance(autodist, replicator.AutoDist):
                session = autodist.create_distributed_session()
            else:
                session = v1.Session()
            values.append(session.run(fetches, {x: feed}))
    return values


@pytest.mark.battery(3)
@pytest.mark.parametrize("rows", [7, 6, 3, 2, 1])
@pytest.mark.parametrize(
    "fetch",
    [
        lambda x: x * 2,
        lambda x: tf.reduce_mean(x),
        lambda x: tf.reduce_mean(x, 0),
        lambda x: tf.reduce_sum(x, 0),
        lambda x: tf.reduce_sum(x) / 2.0 - tf.reduce_sum(x * x),
        lambda x: tf.reduce_max(x) + 0.0 * tf.ones([]),
        lambda x: -tf.reduce_max(x, 0),
        lambda x: tf.reduce_min(x),
        lambda x: tf.reduce_all(x > 3),
        lambda x: tf.reduce_any(x > 3),
        lambda x: tf.shape(x)[0],
        lambda x: tf.shape(x)[1],
        lambda x: tf.size(x),
        lambda x: tf.reduce_sum(tf.cast(x > 3, tf.int32)),
        lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32),
        lambda x: tf.reduce_mean(x) * tf.cast(tf.shape(x)[0], tf.float32),
        lambda x: tf.as_string(x),
        lambda x: tf.sparse.from_dense(x),
        lambda x: tf.constant([1, 2, 3]),
        lambda x: {"a": [x, (tf.reduce_mean(x),)], "b": tf.no_op()},
        lambda x: tf.reshape(x, [-1]),
        lambda x: tf.gradients(tf.reduce_mean(x * x), [x]),
        lambda x: tf.gradients(tf.reduce_sum(x * x), [x]),
        lambda x: tf.gradients(x * x, [x]),
    ],
)
def test_what_is_fetched_is_that_of_one_device(fetch, rows):
    name = "reduce_max(x) + 0"
    actual, expected = both(fetch, X[:rows])
    for a, b in zip(
        tf.nest.flatten(actual, expand_composites=True),
        tf.nest.flatten(expected, expand_composites=True),
        strict=True,
    ):
        if b is None:
            assert a is None, name
            continue
        assert np.asarray(a).dtype == np.asarray(b).dtype
        if np.asarray(b).dtype.kind in "OS":
            assert np.array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-6)


def test_nests_keep_their_types_and_names_stand_for_what_is_fetched_and_fed():
    pair = collections.namedtuple("pair", "one two")
    with scope() as autodist:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        tf.identity(x * 2, "double")
        session = autodist.create_distributed_session()
        fetches = collections.OrderedDict(p=pair("double:0", [x]), q="double")
        actual = session.run(fetches, {"x:0": X})
    assert isinstance(actual, collections.OrderedDict)
    assert isinstance(actual["p"], pair)
    np.testing.assert_array_equal(actual["p"].one, X * 2)
    np.testing.assert_array_equal(actual["p"].two[0], X)
    assert actual["q"] is None  # an operation


def test_variables_are_the_same_on_all_replicas_and_written_once():
    for name in ("mirrored", "sharded"):
        with scope(3, name) as autodist:
            v = tf.Variable(tf.ones([4, 2]))
            n = tf.Variable(0)
            add = v.assign_add(tf.ones([4, 2]))
            count = n.assign_add(1)
            session = autodist.create_distributed_session()
            session.run([add.op, count.op])
            actual = session.run(add)
            np.testing.assert_array_equal(actual, np.full([4, 2], 3))
            assert session.run([n, v])[0] == 1
            assert session.run(count) == 2
            late = v.assign_sub(tf.ones([4, 2]))  # after the session
            session.run(late)
            np.testing.assert_array_equal(v.eval(session), np.full([4, 2], 2))


def test_metrics_of_tensorflow_1_count_all_examples():
    with scope() as autodist:
        x = v1.placeholder(tf.float32, [None])
        value, update = v1.metrics.mean(x)
        session = autodist.create_distributed_session()
        for n in (5, 2, 4):
            session.run(update, {x: np.arange(n)})
        expected = np.concatenate([np.arange(n) for n in (5, 2, 4)]).mean()
        np.testing.assert_allclose(session.run(value), expected, rtol=1e-6)


def test_a_loss_that_is_a_sum_over_the_examples_trains_as_on_one_device():
    results = []
    for place in (scope(), tf.Graph().as_default()):
        with place as autodist:
            x = v1.placeholder(tf.float32, [None, 2])
            w = tf.Variable([[1.0], [2.0]])
            loss = tf.reduce_sum(tf.matmul(x, w) ** 2)
            train = v1.train.GradientDescentOptimizer(1e-3).minimize(loss)
            if isinstance(autodist, replicator.AutoDist):
                session = autodist.create_distributed_session()
            else:
                session = v1.Session()
                session.run(v1.global_variables_initializer())
            losses = [session.run([loss, train], {x: X[:n]})[0] for n in (7, 2, 6)]
            results.append([*losses, session.run(w)])
    helpers.assert_equal(*results)


def test_gradients_of_a_tape_are_those_of_one_device():
    with scope() as autodist:
        x = v1.placeholder(tf.float32, [None, 2])
        w = tf.Variable([[1.0], [2.0]])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
        gradient = tape.gradient(loss, w)
        session = autodist.create_distributed_session()
        actual = session.run(gradient, {x: X})
    np.testing.assert_allclose(actual, 2 * X.T @ (X @ [[1], [2]]) / 7, rtol=1e-5)


def test_what_a_function_reads_before_it_writes_is_what_was_there_before():
    with scope(2) as autodist:
        v = v1.get_variable("v", initializer=np.zeros([128, 128], np.float32))

        @tf.function
        def spend():
            spent = tf.matmul(v, tf.eye(128)) + v
            v.assign(spent + 1.0)
            return tf.reduce_mean(spent + tf.matmul(v, tf.eye(128)))

        found = spend()
        session = autodist.create_distributed_session()
        assert [session.run(found) for _ in range(3)] == [1.0, 5.0, 13.0]


def test_iterators_begin_anew_with_what_they_are_fed():
    with scope(2) as autodist:
        placeholder = v1.placeholder(tf.float32, [None])
        data = tf.data.Dataset.from_tensor_slices(placeholder).batch(2)
        iterator = v1.data.make_initializable_iterator(data)
        mean = tf.reduce_mean(iterator.get_next())
        session = autodist.create_distributed_session()
        for values in ([1, 2, 6], [3, 5, 7, 9]):
            session.run(iterator.initializer, {placeholder: values})
            assert session.run(mean) == np.mean(values[:2])
            assert session.run(mean) == np.mean(values[2:])


def test_replicas_draw_different_numbers():
    with scope(2) as autodist:
        v1.set_random_seed(7)
        x = v1.placeholder(tf.float32, [None])
        draws = tf.random.uniform(tf.shape(x))
        session = autodist.create_distributed_session()
        actual = session.run(draws, {x: np.zeros(4)})
    assert len(set(actual.tolist())) == 4


def test_tables_and_python_functions_are_used_by_all_replicas():
    with scope(2) as autodist:
        x = v1.placeholder(tf.string, [None])
        keys = tf.constant(["a", "b"])
        table = tf.lookup.StaticHashTable(
            tf.lookup.KeyValueTensorInitializer(keys, tf.constant([1.0, 2.0])), 0.0
        )
        actual = table.lookup(x)
        doubled = v1.py_func(lambda v: v * 2, [actual], tf.float32)
        doubled.set_shape([None])
        session = autodist.create_distributed_session()
        values = session.run([actual, doubled], {x: ["b", "c", "a"]})
    assert [v.tolist() for v in values] == [[2, 0, 1], [4, 0, 2]]


def test_summaries_hold_the_mean():
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        v1.summary.scalar("mean", tf.reduce_mean(x))
        session = autodist.create_distributed_session()
        summary = v1.Summary()
        summary.ParseFromString(session.run(v1.summary.merge_all(), {x: [1, 2, 6]}))
    assert summary.value[0].simple_value == 3


def test_run_options_give_a_trace_of_all_replicas():
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None, 2])
        w = tf.Variable(tf.ones([2, 2]))
        y = tf.matmul(x, w)
        session = autodist.create_distributed_session()
        metadata = v1.RunMetadata()
        options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
        session.run(y, {x: X}, options, metadata)
    names = {
        node.node_name for d in metadata.step_stats.dev_stats for node in d.node_stats
    }
    for replica in ("replica_0", "replica_1"):
        assert any(name.startswith(replica) and "/MatMul" in name for name in names)


def test_a_session_of_the_users_graph():
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        mean = tf.reduce_mean(x)
        with autodist.create_distributed_session() as session:
            assert session.graph is tf.compat.v1.get_default_graph()
            assert mean.eval({x: [1, 2, 6]}) == 3
            assert session.make_callable(mean, [x])([1, 5]) == 3
            assert len(session.list_devices()) >= 2


def test_a_config_of_the_users_gets_the_devices_of_all_replicas():
    with scope(3) as autodist:
        x = v1.placeholder(tf.float32, [None])
        config = v1.ConfigProto(allow_soft_placement=False)
        session = autodist.create_distributed_session(config)
        assert session.run(x * 2, {x: [1, 2, 3]}).tolist() == [2, 4, 6]
        with pytest.raises(replicator.ArgumentError, match="(?s)config='no'.*Fix"):
            autodist.create_distributed_session("no")


@pytest.mark.parametrize("given", [None, False, True])
def test_ops_without_a_kernel_go_to_the_host_unless_a_config_decides(given):
    config = None if given is None else v1.ConfigProto(allow_soft_placement=given)
    made = configured(config, ["/job:localhost/task:0/device:CPU:0"])
    assert made.allow_soft_placement == (given in (None, True))


@pytest.mark.parametrize("chosen", ["", "0"])
def test_gpus_stay_split_unless_a_config_chooses_them(chosen, monkeypatch):
    process = v1.ConfigProto()
    process.gpu_options.experimental.virtual_devices.add(memory_limit_mb=[512, 512])
    monkeypatch.setattr(graphs, "session_config", lambda: process)
    config = v1.ConfigProto()
    config.gpu_options.allow_growth = True
    config.gpu_options.visible_device_list = chosen
    made = configured(config, ["/job:localhost/task:0/device:GPU:1"])
    parts = made.gpu_options.experimental.virtual_devices
    assert [list(part.memory_limit_mb) for part in parts] == (
        [] if chosen else [[512, 512]]
    )
    assert made.gpu_options.allow_growth


Pair = collections.namedtuple("Pair", "one two")


def test_fetches_may_be_dicts_whose_keys_have_no_order():
    first = object()
    nests = both(lambda x: [{first: tf.reduce_sum(x), "b": {2: x}}, Pair({1: x}, ())])
    for (named, pair), session in zip(nests, ("distributed", "plain"), strict=True):
        assert list(named) == [first, "b"], session
        np.testing.assert_array_equal(named[first], X.sum())
        np.testing.assert_array_equal(named["b"][2], X)
        np.testing.assert_array_equal(pair.one[1], X)
        assert type(pair) is Pair and list(pair.two) == []


def test_hooks_of_monitored_sessions_may_fetch():
    with scope() as autodist:
        x = v1.placeholder(tf.float32, [None, 2])
        weight = v1.get_variable("weight", initializer=1.0)
        step = v1.train.create_global_step()
        loss = tf.reduce_mean((x * weight) ** 2)
        train = v1.train.GradientDescentOptimizer(0.001).minimize(loss, step)

        class Creator(v1.train.SessionCreator):
            def create_session(self):
                return autodist.create_distributed_session()

        hooks = [v1.train.StopAtStepHook(num_steps=3), v1.train.NanTensorHook(loss)]
        losses = []
        with v1.train.MonitoredSession(Creator(), hooks) as session:
            while not session.should_stop():
                losses.append(session.run([train, loss], {x: X})[1])
    expected, value = [], 1.0
    for _ in range(3):
        expected.append(np.mean((X * value) ** 2))
        value -= 0.001 * np.mean(2 * value * X**2)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert len(losses) == 3


def test_a_name_may_begin_those_of_others():
    with scope() as autodist:
        x = v1.placeholder(tf.float32, [None, 2])
        weight = v1.get_variable("weight", initializer=1.0)
        loss = tf.reduce_mean(weight * x, name="loss")
        twice = tf.multiply(loss, 2.0, name="loss_1")
        total = tf.Variable(5.0, name="loss/total", trainable=False)
        session = autodist.create_distributed_session()
        values = session.run([loss, twice, total], {x: X})
    np.testing.assert_allclose(values, [X.mean(), 2.0 * X.mean(), 5.0], rtol=1e-6)


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_rows_are_read_before_what_is_computed_from_them_is_written(num_replicas):
    """As in a center loss; each replica reads rows that only the owner writes."""
    kinds = np.array([0, 1, 2, 0, 1], np.int32)

    def steps(make_session):
        kind = v1.placeholder(tf.int32, [None])
        initial = tf.ones([3, 2])
        centers = v1.get_variable("centers", initializer=initial, trainable=False)
        rows = tf.gather(centers, kind)
        update = v1.scatter_sub(centers, kind, 0.25 * rows)
        loss = tf.reduce_sum(rows * rows)
        with tf.control_dependencies([update]):
            train = tf.no_op()
        session = make_session()
        fetches = [loss, rows, train]
        losses = [session.run(fetches, {kind: kinds})[:2] for _ in range(3)]
        return [*losses, session.run(centers)]

    def plain():
        session = v1.Session()
        session.run(v1.global_variables_initializer())
        return session

    with tf.Graph().as_default():
        expected = steps(plain)
    with scope(num_replicas, None) as autodist:
        actual = steps(autodist.create_distributed_session)
    for own, one in zip(
        tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True
    ):
        np.testing.assert_allclose(own, one, rtol=1e-6)
