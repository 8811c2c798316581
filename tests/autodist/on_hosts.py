# SPDX-License-Identifier: Apache-2.0
"""Programs for one device on the replicas of two hosts, for test_hosts.py.

Its arguments are the addresses of servers with one CPU device each. Runs every function
of CHECKS in plain TensorFlow and on the hosts, and prints the names of those whose
results differ, with both, as JSON.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests.autodist import helpers
from tests.cluster import servers

v1 = tf.compat.v1
CHECKS: dict[str, Callable[..., Any]] = {}
X = np.linspace(-1.0, 1.0, 15, dtype=np.float32).reshape(5, 3)
WORDS = np.array([b"b", b"a", b"c", b"a", b"b"])


def check(function: Callable[..., Any]) -> Any:
    """Adds a function to CHECKS; it is given what makes a session or a function."""
    CHECKS[function.__name__] = function
    return function


def _python(x: np.ndarray) -> np.ndarray:
    """Is known in this process only."""
    return np.sort(x, 0)


@check
def feeds(session_of: Any, function: Any) -> Any:
    """Several fetches, uneven batches, Adam with its slots."""
    x = v1.placeholder(tf.float32, [None, 3])
    w = v1.get_variable("w", [3, 1], initializer=v1.zeros_initializer())
    loss = tf.reduce_mean((x @ w - tf.reduce_sum(x, 1, keepdims=True)) ** 2)
    train = v1.train.AdamOptimizer(0.1).minimize(loss)
    session = session_of()
    found = [session.run([loss, x @ w, train], {x: X[:n]})[:2] for n in (5, 2, 1, 3)]
    return [*found, session.run(w)]


@check
def a_dataset_that_calls_python(session_of: Any, function: Any) -> Any:
    data = tf.data.Dataset.from_generator(
        lambda: (X + k for k in range(3)),
        output_signature=tf.TensorSpec([None, 3], tf.float32),
    )
    x = v1.data.make_one_shot_iterator(data).get_next()
    session = session_of()
    found = [session.run([x, tf.reduce_mean(x)]) for _ in range(3)]
    try:
        session.run(x)
    except tf.errors.OutOfRangeError:
        return [*found, 1]
    return found


@check
def a_file_of_the_programs_host(session_of: Any, function: Any) -> Any:
    folder = pathlib.Path("read")
    folder.mkdir(exist_ok=True)
    (folder / "lines").write_text("1\n2\n3\n4\n")
    data = tf.data.TextLineDataset("read/lines").batch(3)
    iterator = v1.data.make_initializable_iterator(data)
    x = tf.strings.to_number(iterator.get_next())
    text = tf.io.read_file("read/lines")
    session = session_of()
    session.run(iterator.initializer)
    return [session.run([x, tf.reduce_sum(x)]) for _ in range(2)] + [session.run(text)]


@check
def a_queue(session_of: Any, function: Any) -> Any:
    queue = v1.FIFOQueue(20, [tf.float32], [[]])
    x = v1.placeholder(tf.float32, [None])
    fill, pulled = queue.enqueue_many([x]), queue.dequeue_many(4)
    session = session_of()
    session.run(fill, {x: X.ravel()})
    mean = tf.reduce_mean(pulled)
    return [session.run([pulled, mean]) for _ in range(3)] + [session.run(queue.size())]


@check
def a_table_and_python(session_of: Any, function: Any) -> Any:
    words = v1.placeholder(tf.string, [None])
    keys, values = tf.constant(["a", "b"]), tf.constant([1.0, 2.0])
    init = tf.lookup.KeyValueTensorInitializer(keys, values)
    numbers = tf.lookup.StaticHashTable(init, -1.0).lookup(words)
    ranked = v1.py_func(_python, [numbers], tf.float32)
    ranked.set_shape([None])
    session = session_of()
    return session.run([numbers, ranked, tf.reduce_sum(ranked)], {words: WORDS})


@check
def checkpoints_and_summaries(session_of: Any, function: Any) -> Any:
    x = v1.placeholder(tf.float32, [None, 3])
    w = v1.get_variable("w", [3], initializer=v1.ones_initializer())
    train = w.assign_add(tf.reduce_sum(x, 0))
    v1.summary.scalar("mean", tf.reduce_mean(x))
    merged, saver = v1.summary.merge_all(), v1.train.Saver()
    session = session_of()
    with tempfile.TemporaryDirectory() as folder:
        session.run(train, {x: X})
        path = saver.save(session, f"{folder}/model")
        session.run(train, {x: X[:2]})
        saver.restore(session, path)
        names = sorted(file.name for file in pathlib.Path(folder).iterdir())
        return [session.run(w), session.run(merged, {x: X}), *names]


@check
def a_function(session_of: Any, function: Any) -> Any:
    w = tf.Variable([[1.0], [2.0], [3.0]])
    table = tf.lookup.experimental.DenseHashTable(tf.string, tf.float32, -1.0, "", "-")
    table.insert(["a", "b"], [1.0, 2.0])
    elements = iter(tf.data.Dataset.range(4))

    @function
    def step(x: tf.Tensor, words: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        ranked = tf.numpy_function(_python, [x @ w], tf.float32)
        return loss, x @ w, ranked, table.lookup(words), next(elements)

    return [step(X[:n], WORDS[:n]) for n in (5, 3, 1)] + [w.read_value()]


def _results(name: str, autodist: Any) -> Any:
    """Returns a check's results; in plain TensorFlow without an AutoDist."""
    begin = helpers.plain_session if autodist is None else None
    if name == "a_function":
        if autodist is None:
            return CHECKS[name](None, lambda f: f)
        with autodist.scope():
            return CHECKS[name](None, autodist.function)
    with tf.Graph().as_default():
        if autodist is None:
            return CHECKS[name](begin, None)
        with autodist.scope():
            return CHECKS[name](autodist.create_distributed_session, None)


def equal(cluster: Any) -> dict[str, str]:
    """Returns what differs on the hosts, or fails there."""
    wrong = {}
    for name in CHECKS:
        expected = _results(name, None)
        for strategy in (None, replicator.strategy.PartitionedPS()):
            autodist = replicator.AutoDist(cluster.devices, strategy)
            try:
                helpers.assert_equal(
                    tf.nest.map_structure(np.asarray, _results(name, autodist)),
                    tf.nest.map_structure(np.asarray, expected),
                )
            except Exception as error:
                wrong[f"{name} {strategy}"] = f"{type(error).__name__}: {error}"
    return wrong


def _message(run: Callable[[], Any]) -> list[Any]:
    began = time.monotonic()
    try:
        run()
    except Exception as error:
        return [type(error).__name__, str(error), time.monotonic() - began]
    return ["nothing", "", time.monotonic() - began]


def _turns(x: Any, w: Any) -> Any:
    """Computes for hours, on all hosts."""
    return tf.while_loop(
        lambda k, y: k < 1000000000,
        lambda k, y: (k + 1, tf.tanh(y @ w) - tf.reduce_mean(y)),
        (0, x),
    )


def _lost_by_function(autodist: Any, fault: threading.Timer) -> dict[str, Any]:
    with autodist.scope():
        w = tf.Variable(tf.eye(3))
    endless = autodist.function(lambda x: _turns(x, w))
    fault.start()
    return {"run": _message(lambda: endless(X))}


def _lost_by_session(autodist: Any, fault: threading.Timer) -> dict[str, Any]:
    with tf.Graph().as_default(), autodist.scope():
        x = v1.placeholder(tf.float32, [None, 3])
        w = v1.get_variable("w", initializer=tf.eye(3))
        endless, mean = _turns(x, w), tf.reduce_mean(x)
        session = autodist.create_distributed_session()
        fault.start()
        return {
            "run": _message(lambda: session.run(endless, {x: X})),
            "again": _message(lambda: session.run(mean, {x: X})),
            "new": _message(autodist.create_distributed_session),
            "close": _message(session.close),
        }


def lost(addresses: list[str], how: int) -> dict[str, Any]:
    """Has a host killed or stopped in the middle of a call, by session and function."""
    results = {}
    for lose in (_lost_by_session, _lost_by_function):
        server = servers.start("--cpus=1", "--watch=stdin")
        both = [addresses[0], servers.facts(server)["address"]]
        autodist = replicator.AutoDist(replicator.connect(both, heartbeat=3.0).devices)
        fault = threading.Timer(4.0, lambda: os.kill(server.pid, how))  # noqa: B023
        results |= {lose.__name__: lose(autodist, fault), "host": both[1]}
        server.kill()
    return results


if __name__ == "__main__":
    how, *addresses = sys.argv[1:]
    if how == "equal":
        print(json.dumps(equal(replicator.connect(addresses))), flush=True)
    else:
        print(json.dumps(lost(addresses, int(how))), flush=True)
    os._exit(0)  # skips the exit of a connected process, which is not tested
