# SPDX-License-Identifier: Apache-2.0
"""What a session takes and gives beside values: configs, traces, hooks and files."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator._tf import graphs
from replicator.autodist.session import configured
from replicator.strategy import PartitionedPS
from tests.autodist import helpers
from tests.autodist.helpers import scope

v1 = tf.compat.v1
X = np.arange(14, dtype=np.float32).reshape(7, 2)


def test_replicas_draw_different_numbers() -> None:
    with scope(2) as autodist:
        v1.set_random_seed(7)
        x = v1.placeholder(tf.float32, [None])
        draws = tf.random.uniform(tf.shape(x))
        session = autodist.create_distributed_session()
        actual = session.run(draws, {x: np.zeros(4)})
    assert len(set(actual.tolist())) == 4


def test_run_options_give_a_trace_of_all_replicas() -> None:
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


# --- Configs --------------------------------------------------------------------------


def test_a_config_of_the_users_gets_the_devices_of_all_replicas() -> None:
    with scope(3) as autodist:
        x = v1.placeholder(tf.float32, [None])
        config = v1.ConfigProto(allow_soft_placement=False)
        session = autodist.create_distributed_session(config)
        assert session.run(x * 2, {x: [1, 2, 3]}).tolist() == [2, 4, 6]


@pytest.mark.parametrize("given", [None, False, True])
def test_ops_without_a_kernel_go_to_the_host_unless_a_config_decides(given) -> None:
    config = None if given is None else v1.ConfigProto(allow_soft_placement=given)
    made = configured(config, ["/job:localhost/task:0/device:CPU:0"])
    assert made.allow_soft_placement == (given in (None, True))


@pytest.mark.parametrize("chosen", ["", "0"])
def test_gpus_stay_split_unless_a_config_chooses_them(chosen, monkeypatch) -> None:
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


# --- Session creators, on one device and on 1 to 3 replicas ---------------------------


def _creator(autodist: Any, **options: Any) -> Any:
    """Returns a session creator: TensorFlow's own, if there is no AutoDist."""
    if autodist is not None:
        return autodist.session_creator(**options)
    return v1.train.ChiefSessionCreator(**options)


def _on_each(program: Any) -> list[Any]:
    with tf.Graph().as_default():
        found = [program(None)]
    for count in (1, 2, 3):
        with scope(count, None) as autodist:
            found.append(program(autodist))
    return found


def _trained() -> tuple[Any, ...]:
    x = v1.placeholder(tf.float32, [None, 2])
    w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
    step = v1.train.get_or_create_global_step()
    loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
    train = v1.train.AdamOptimizer(0.1).minimize(loss, step)
    return x, w, loss, train


def test_hooks_stop_a_session_and_see_what_is_fetched() -> None:
    def program(autodist: Any) -> Any:
        x, w, loss, train = _trained()

        class Noting(v1.train.SessionRunHook):
            def before_run(self, context: Any) -> Any:
                return v1.train.SessionRunArgs({"loss": loss, "rows": x})

            def after_run(self, context: Any, values: Any) -> None:
                seen.append((values.results["loss"], values.results["rows"].shape))

            def end(self, session: Any) -> None:
                seen.append(session.run(w))

        seen: list[Any] = []
        stop = v1.train.StopAtStepHook(num_steps=3)
        hooks = [stop, v1.train.NanTensorHook(loss), Noting()]
        with v1.train.MonitoredSession(_creator(autodist), hooks) as session:
            while not session.should_stop():
                session.run(train, {x: X})
        return seen

    expected, *others = _on_each(program)
    assert len(expected) == 4
    for actual in others:
        helpers.assert_equal(actual, expected)


def test_a_session_goes_on_from_the_newest_checkpoint(tmp_path: pathlib.Path) -> None:
    def program(autodist: Any) -> Any:
        x, _, loss, train = _trained()
        folder = str(tmp_path / str(autodist and autodist.replicator.num_replicas))
        creator = _creator(autodist, checkpoint_dir=folder)
        hooks = [v1.train.CheckpointSaverHook(folder, save_steps=1)]
        with v1.train.MonitoredSession(creator, hooks) as session:
            return [session.run([loss, train], {x: X})[0] for _ in range(2)]

    begun, gone_on = (_on_each(program) for _ in range(2))
    for actual in zip(begun[1:], gone_on[1:], strict=True):
        helpers.assert_equal(actual, (begun[0], gone_on[0]))


def test_a_scaffold_says_what_begins_and_how() -> None:
    def program(autodist: Any) -> Any:
        w, late = (v1.get_variable(name, initializer=1.0) for name in ("w", "late"))
        given = v1.placeholder(tf.float32, [])
        local = v1.get_variable(
            "local", initializer=2.0, collections=[v1.GraphKeys.LOCAL_VARIABLES]
        )
        scaffold = v1.train.Scaffold(
            init_op=tf.group(v1.global_variables_initializer()),
            init_feed_dict={given: 5.0},
            init_fn=lambda scaffold, session: session.run(write, {given: 7.0}),
        )
        write = late.assign(given).op
        creator = _creator(autodist, scaffold=scaffold)
        with v1.train.MonitoredSession(creator) as session:
            return session.run([w, late, local])

    assert _on_each(program) == [[1, 7, 2]] * 4


# --- Files ----------------------------------------------------------------------------


def _built() -> Any:
    x = v1.placeholder(tf.float32, [None, 3], "x")
    w = v1.get_variable("w", [3, 2])
    y = tf.matmul(x, w, name="y")
    train = v1.train.AdamOptimizer(0.1).minimize(tf.reduce_mean(y**2))
    return x, w, y, train


@pytest.mark.parametrize("strategy", ["mirrored", "sharded", PartitionedPS()])
def test_a_checkpoint_loads_on_one_device_and_on_other_replicas(
    strategy: Any, tmp_path: pathlib.Path
) -> None:
    with scope(3, strategy) as autodist:
        x, w, y, train = _built()
        saver, session = v1.train.Saver(), autodist.create_distributed_session()
        session.run(train, {x: np.ones([4, 3])})
        path = saver.save(session, str(tmp_path / "model"))
        expected = session.run([w, y], {x: np.ones([2, 3])})
    names = {name for name, _ in tf.train.list_variables(path)}
    assert names == {"w", "w/Adam", "w/Adam_1", "beta1_power", "beta2_power"}

    def loaded(begin: Any) -> Any:
        x, w, y, _ = _built()
        session = begin()
        v1.train.Saver().restore(session, path)  # made after the session
        return session.run([w, y], {x: np.ones([2, 3])})

    with tf.Graph().as_default():
        helpers.assert_equal(loaded(v1.Session), expected)
    with scope(2, None) as autodist:
        helpers.assert_equal(loaded(autodist.create_distributed_session), expected)


def test_a_saved_model_is_that_of_the_single_device_graph(
    tmp_path: pathlib.Path,
) -> None:
    with scope(2, "sharded") as autodist:
        x, _, y, train = _built()
        session = autodist.create_distributed_session()
        session.run(train, {x: np.ones([4, 3])})
        expected = session.run(y, {x: np.ones([2, 3])})
        v1.saved_model.simple_save(session, str(tmp_path / "out"), {"x": x}, {"y": y})
    loaded = tf.saved_model.load(str(tmp_path / "out"))
    actual = loaded.signatures["serving_default"](tf.ones([2, 3]))["y"]
    np.testing.assert_allclose(actual, expected, rtol=1e-6)
    text = (tmp_path / "out" / "saved_model.pb").read_bytes()
    assert b"replica_0" not in text and b"PyFunc" not in text
