# SPDX-License-Identifier: Apache-2.0
"""Programs for one device on the replicas of two hosts, for test_hosts.py.

Its arguments are the addresses of servers with one CPU device each. Runs programs of
the catalogue in plain TensorFlow and on the hosts, and prints the names of those whose
results differ, with both, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests.autodist import catalogue, helpers
from tests.cluster import servers

v1 = tf.compat.v1
X = np.linspace(-1.0, 1.0, 15, dtype=np.float32).reshape(5, 3)
# Of the catalogue: elements, files, Python, tables and checkpoints of the program.
SESSIONS = (
    *("batches_of_two_lengths", "elements_of_few_rows_or_none", "a_file", "a_table"),
    *("a_queue, plain", "a_checkpoint", "a_step_that_is_built_later", "a_summary"),
)
FUNCTIONS = (
    *("trained, by hand", "embeddings, table", "an_iterator, itself"),
    "what_python_computes",
)


def _in_session(name: str, autodist: Any) -> tuple[Any, Any]:
    """Returns what a program of sessions gives on hosts, and on one device."""
    run = catalogue.SESSIONS[name].run
    with tf.Graph().as_default(), autodist.scope():
        found = run(autodist.create_distributed_session)
    with tf.Graph().as_default():
        return found, run(helpers.plain_session)


def _in_function(name: str, autodist: Any) -> tuple[Any, Any]:
    """The same of a program of functions."""

    def door(make: Any) -> Any:
        with autodist.scope():
            function, variables = make()
        return autodist.function(function), variables

    program = catalogue.FUNCTIONS[name]
    return program.run(door), program.one_device()


def equal(cluster: Any) -> dict[str, str]:
    """Returns what differs on the hosts, or fails there."""
    wrong = {}
    programs = [(name, _in_session) for name in SESSIONS]
    programs += [(name, _in_function) for name in FUNCTIONS]
    for name, run in programs:
        for strategy in (None, replicator.strategy.PartitionedPS()):
            autodist = replicator.AutoDist(cluster.devices, strategy)
            try:
                helpers.assert_equal(*run(name, autodist), 1e-4)
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
