# SPDX-License-Identifier: Apache-2.0
"""Clients of servers, in separate processes, since they stay connected.

`python -m tests.cluster.programs NAME ADDRESS...` prints a function's result, as JSON.
The tests have the expected results.
"""

from __future__ import annotations

import contextlib
import doctest
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator.cluster import state
from tests.cluster import servers

_STEPS = 12


def message(function: Callable[[], Any]) -> list[str]:
    """Returns the type and the text of the error that a function raises."""
    try:
        function()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


# --- Results of steps -----------------------------------------------------------------


def steps(addresses: Sequence[str]) -> dict[str, Any]:
    """Variables, checkpoints and a training over two hosts with two replicas each."""
    cluster = replicator.connect(addresses)
    plain = _train(None)
    results: dict[str, Any] = {"plain": plain}
    for kind in ("mirrored", "sharded"):
        repl = replicator.Replicator(cluster.devices, variables=kind)
        results[kind] = {
            "overtaken": _overtaken(repl),
            "losses": _train(repl),
            "variable": _variable(repl),
            "checkpoint": _checkpoint(repl),
        }
    return results


def _overtaken(repl: replicator.Replicator) -> int:
    """Returns how many of 200 steps do not read an earlier write."""
    with repl.context():
        v = tf.Variable(0.0)
    step = repl.build(lambda: repl.all_reduce(v + 0.0, "mean"))
    wrong = 0
    for k in range(200):
        v.assign(k)
        wrong += any(float(x) != k for x in step())
    return wrong


def _variable(repl: replicator.Replicator) -> list[float]:
    with repl.context():
        v = tf.Variable([1.0, 2.0])
    v.assign_add([1.0, 1.0])
    repl.run(lambda: v.assign_add(repl.all_reduce(v * (repl.replica_id + 1.0))))
    v[0].assign(7.0)
    return v.numpy().tolist()


def _checkpoint(repl: replicator.Replicator) -> dict[str, Any]:
    """Saves on the hosts, restores without them, and the other way around."""
    with repl.context():
        v = tf.Variable([1.0, 2.0, 3.0])
    step = repl.build(lambda: v.assign_add(tf.ones([3])))
    step()
    with tempfile.TemporaryDirectory() as folder:
        saved = tf.train.Checkpoint(v=v).save(f"{folder}/one")
        local = tf.Variable([0.0, 0.0, 0.0])
        tf.train.Checkpoint(v=local).restore(saved)
        wrong = 0
        for k in range(20):  # a step right after might read old values
            local.assign([k, k, k])
            again = tf.train.Checkpoint(v=local).write(f"{folder}/{k}")
            tf.train.Checkpoint(v=v).read(again).assert_consumed()
            wrong += any(x.numpy().tolist() != [k + 1.0] * 3 for x in step())
        tf.train.Checkpoint(v=local).restore(saved)
    return {"saved": local.numpy().tolist(), "overtaken": wrong}


def _train(repl: replicator.Replicator | None) -> list[float]:
    """Returns the losses of a small network with Adam; None: on one device."""
    random = np.random.default_rng(3)
    x = random.normal(size=[32, 8]).astype(np.float32)
    y = np.argmax(x @ random.normal(size=[8, 3]), axis=1)

    def make() -> tuple[Any, Any]:
        tf.keras.utils.set_random_seed(1)
        layers = tf.keras.layers
        model = tf.keras.Sequential([layers.Dense(16, "tanh"), layers.Dense(3)])
        return model, tf.keras.optimizers.Adam(0.02)

    def train(model: Any, optimizer: Any, x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            each = tf.keras.losses.sparse_categorical_crossentropy(y, model(x), True)
            loss = tf.reduce_mean(each)
        v = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, v), v, strict=True))
        return loss

    if repl is None:
        model, optimizer = make()
        function = tf.function(lambda: train(model, optimizer, x, y))
        return [float(function()) for _ in range(_STEPS)]
    with repl.context():
        model, inner = make()
        optimizer = repl.wrap_optimizer(inner)

    def step_fn(batch: Any) -> tf.Tensor:
        return repl.all_reduce(train(model, optimizer, *batch), "mean")

    data = tf.data.Dataset.from_tensors((x, y)).repeat()
    step = repl.build(step_fn, data, input_mode="global_batch")
    return [float(step()[0]) for _ in range(_STEPS)]


# --- Devices --------------------------------------------------------------------------


def names(addresses: Sequence[str]) -> dict[str, Any]:
    """The devices that names refer to, once connected."""
    cluster = replicator.connect(addresses)
    make = replicator.Replicator
    results = {
        "all": list(cluster.devices),
        "none": list(make(None).devices),
        "own": list(make(["CPU:0"]).devices),
        "full": list(make([cluster.devices[3], cluster.devices[0]]).devices),
        "missing": message(lambda: make(["/job:worker/task:1/device:CPU:7"])),
        "no host": message(lambda: make(["/job:worker/task:2/device:CPU:0"])),
        "too late": message(lambda: make(["CPU:0", "CPU:1"])),
        "host of": message(lambda: cluster.host_of("CPU:0")),
        "repr": repr(cluster),
    }
    with tf.device("CPU:0"):
        results["client computes"] = tf.random.uniform([]).device
    repl = make(cluster.devices[:2])
    step = repl.build(lambda: repl.all_reduce(1.0))
    step()
    with tf.experimental.async_scope():
        results["async"] = message(step)
    results["after async"] = [float(x) for x in step()]
    cluster.close()
    return results


def unordered(addresses: Sequence[str]) -> dict[str, Any]:
    """A connection that TensorFlow made by itself."""
    spec = tf.train.ClusterSpec({"worker": list(addresses)})
    tf.config.experimental_connect_to_cluster(spec)
    devices = [f"/job:worker/task:{k}/device:CPU:0" for k in range(2)]
    results = {
        "refused": message(lambda: replicator.Replicator(devices)),
        "none": message(lambda: replicator.Replicator(None)),
        "own": list(replicator.Replicator(["CPU:0"]).devices),
        "connect": message(lambda: replicator.connect(addresses)),
    }
    os.environ[state.ORDERING] = "0"
    results["ordered"] = list(replicator.Replicator(None).devices)
    return results


def task(addresses: Sequence[str]) -> dict[str, Any]:
    """A process that is itself a task of a cluster."""
    del addresses
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
    repl = replicator.Replicator(["CPU:0"])
    values = repl.run(lambda: repl.all_reduce(3.0))
    del strategy
    return {"devices": list(repl.devices), "value": float(values[0])}


# --- Connecting -----------------------------------------------------------------------


def connecting(addresses: Sequence[str]) -> dict[str, Any]:
    """Connects, closes, reconnects elsewhere, and its errors."""
    connect = replicator.connect
    results: dict[str, Any] = {"missing": _missing(addresses)}
    v, constant = tf.Variable(1.0), tf.constant(2.0)
    cluster = connect(addresses)
    results["kept"] = float(constant + 1.0)
    results["variable made before"] = message(lambda: v + 1.0)[0]
    results["twice"] = message(lambda: connect(addresses))
    results["check"] = message(cluster.check)
    results["in a graph"] = message(tf.function(lambda: connect(addresses)))
    repl = replicator.Replicator(None)
    results["in a step"] = message(lambda: repl.run(lambda: connect(addresses)))
    cluster.close()
    cluster.close()
    results["closed"] = [repr(cluster), message(cluster.check), _sum()]
    with connect(list(reversed(addresses)), client="127.0.0.2:0") as again:
        results["again"] = [list(again.hosts), _sum(), cluster.connected]
    with connect(addresses[:1]) as one:
        results["one"] = [one.num_hosts, _sum()]
    results["error in a block"] = message(_fail_in_block(addresses))
    results["names"] = names(addresses)
    spec = {"hosts": [{"name": "tom", "address": addresses[0], "cpus": 3}]}
    os.environ["REPLICATOR_CLUSTER"] = json.dumps({"version": 1, **spec})
    results["cpus"] = message(connect)
    spec["hosts"][0]["cpus"] = 2
    os.environ["REPLICATOR_CLUSTER"] = json.dumps({"version": 1, **spec})
    with connect() as named:
        results["launched"] = [repr(named), named.source, named.heartbeat]
    return results


def _missing(addresses: Sequence[str]) -> list[Any]:
    """A server that does not exist: reported in time, without damage."""
    began = time.monotonic()
    error = message(
        lambda: replicator.connect([addresses[0], "127.0.0.1:1"], timeout=0.5)
    )
    return [*error, time.monotonic() - began]


def _sum() -> list[float]:
    repl = replicator.Replicator(None)
    return [float(x) for x in repl.run(lambda: repl.all_reduce(1.0))]


def _fail_in_block(addresses: Sequence[str]) -> Callable[[], None]:
    def function() -> None:
        with replicator.connect(addresses):
            raise KeyError("mine")

    return function


def faults(addresses: Sequence[str]) -> dict[str, Any]:
    """Kills, stops and restarts a server while connected; `addresses` is one more."""
    flags = ("--cpus=2", "--watch=stdin")
    server = servers.start(*flags)
    facts = servers.facts(server)
    both = [*addresses, facts["address"]]
    cluster = replicator.connect(both, heartbeat=1.0)
    results: dict[str, Any] = {"sum": _sum()}
    server.send_signal(signal.SIGSTOP)
    results["stopped"] = message(cluster.check)
    results["close"] = message(cluster.close)
    results["connect"] = message(lambda: replicator.connect(both, heartbeat=1.0))
    server.send_signal(signal.SIGCONT)
    results["goes on"] = [message(cluster.check), _sum()]
    server.kill()
    server.wait()
    results["killed"] = message(cluster.check)
    began = time.monotonic()
    results["step"] = [message(_sum)[0], time.monotonic() - began]
    port = facts["address"].rpartition(":")[2]
    server = servers.start(*flags, f"--port={port}")
    servers.facts(server)
    results["restarted"] = message(cluster.check)
    again = replicator.connect(both)  # without closing the previous one
    results["again"] = [_sum(), cluster.connected, message(again.check)]
    server.kill()
    server.wait()
    moved = servers.start(*flags)
    both[1] = servers.facts(moved)["address"]
    results["moved"] = [replicator.connect(both).num_hosts, _sum()]
    moved.kill()
    return results


def stopped_sender(addresses: Sequence[str]) -> dict[str, Any]:
    """Stops a host whose own part of the step is done, but not all of it is sent."""
    server = servers.start("--cpus=1", "--watch=stdin")
    both = [*addresses, servers.facts(server)["address"]]
    repl = replicator.Replicator(replicator.connect(both, heartbeat=3.0).devices)

    def step_fn() -> tf.Tensor:
        rows = repl.gather(tf.random.uniform([2**25]), axis=0, root=0)
        return tf.constant(0.0) if rows is None else tf.reduce_sum(rows[:9])

    repl.run(step_fn)
    began = time.monotonic()
    repl.run(step_fn)
    late = 0.9 * (time.monotonic() - began)  # most of a step is the transfer
    timer = threading.Timer(late, server.send_signal, [signal.SIGSTOP])
    timer.start()

    def run() -> None:
        while True:
            repl.run(step_fn)

    problem = message(run)
    return {"problem": problem, "seconds": time.monotonic() - began, "both": both}


# --- Sessions -------------------------------------------------------------------------


def sessions(addresses: Sequence[str]) -> dict[str, Any]:
    """Sessions on all hosts, one of which is killed; `addresses` is one more."""
    v1 = tf.compat.v1
    server = servers.start("--cpus=2", "--watch=stdin")
    both = [*addresses, servers.facts(server)["address"]]
    cluster = replicator.connect(both, heartbeat=3.0)
    config = v1.ConfigProto(log_device_placement=False, operation_timeout_in_ms=60000)
    given = cluster.session_arguments(config)
    arguments = cluster.session_arguments()
    results: dict[str, Any] = {
        "kept": given["config"].operation_timeout_in_ms,
        "untouched": [len(config.cluster_def.job), sorted(given) == sorted(arguments)],
        "not one": message(lambda: cluster.session_arguments("grpc://mine")),
        "two": message(lambda: cluster.session_arguments(given["config"])),
    }
    repl = replicator.Replicator(cluster.devices)
    with tf.Graph().as_default():
        with repl.context():
            v = v1.get_variable("v", initializer=1.0)

        def step_fn() -> tf.Tensor:
            with tf.device("/job:master/task:0"):
                (number,) = tf.numpy_function(lambda x: [x], [2.0], [tf.float32])
            return v.assign_add(repl.all_reduce(number))

        fetches = repl.run(step_fn)
        initialize = v1.global_variables_initializer()
        v1.get_default_graph().finalize()  # as monitored sessions do
        results["check"] = message(cluster.check)
        session = v1.Session(**given)  # closing it would wait for the lost host
        session.run(initialize)
        results["values"] = np.asarray(
            [session.run(fetches) for _ in range(2)]
        ).tolist()
        results["held by"] = sorted({d.name for d in session.list_devices()})
        server.kill()
        server.wait()

        def run() -> None:
            with cluster.named():
                session.run(fetches)

        results["lost"] = [*message(run), both[1]]
    cluster.close()
    results["closed"] = message(cluster.session_arguments)
    return results


def examples(addresses: Sequence[str]) -> list[str]:
    """Runs the examples of connect and Cluster; returns their wrong outputs."""
    from tests import test_docstrings

    wrong: list[str] = []
    runner = doctest.DocTestRunner(verbose=False)
    for example in test_docstrings.EXAMPLES:
        if test_docstrings.needs_servers(example):
            names: dict[str, Any] = {"replicator": replicator, "tf": tf}
            names["addresses"] = list(addresses)
            made_by_itself = "connect(" in example.docstring
            made_by_itself |= "resilient(" in example.docstring
            if not made_by_itself:
                names["cluster"] = replicator.connect(addresses)
            example.globs = names
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                runner.run(example, out=wrong.append, clear_globs=False)
            if "cluster" in names:
                names["cluster"].close()
    return [f"{runner.summarize(verbose=False).attempted} examples", *wrong]


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    print(json.dumps(globals()[name](rest)), flush=True)
    os._exit(0)  # skips the exit of a connected process, which is not tested
