# SPDX-License-Identifier: Apache-2.0
"""Programs for one device in between-graph mode equal one device, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests.between import processes

_X = np.linspace(-1.0, 1.0, 21, dtype=np.float32).reshape(7, 3)


def _message(run: Callable[[], Any]) -> list[str]:
    try:
        run()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def trained(autodist: Any) -> dict[str, list[Any]]:
    """Returns what functions compute; those of plain TensorFlow without an AutoDist."""
    function = (lambda f: f) if autodist is None else autodist.function
    if autodist is None:
        w, seen = tf.Variable(tf.eye(3)), tf.Variable(0)
    else:
        with autodist.scope():
            w, seen = tf.Variable(tf.eye(3)), tf.Variable(0)
    elements = iter(tf.data.Dataset.from_tensor_slices(_X).batch(3))

    @function
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = x @ w
            loss = tf.reduce_mean(tf.norm(y[1:] - y[:-1] + 0.1, axis=1))
        gradient = tape.gradient(loss, w)
        w.assign_sub(0.1 * tf.clip_by_norm(gradient, 0.5))
        seen.assign_add(tf.shape(x)[0])
        return loss, y, tf.sort(y, axis=0)

    @function
    def pulled() -> Any:
        x = next(elements)
        return x, tf.reduce_sum(x)

    @function
    def by_python(x: tf.Tensor) -> tf.Tensor:
        y = tf.numpy_function(np.cumsum, [x], tf.float32)
        y.set_shape([None])
        return y

    results = {
        "steps": [step(_X[:n]) for n in (7, 4, 1, 3)],
        "elements": [pulled() for _ in range(3)],
        "python": [by_python(_X[:, 0])],
        "variables": [w.read_value(), seen.read_value()],
    }
    flat = {name: tf.nest.flatten(value) for name, value in results.items()}
    return {k: [np.asarray(x).tolist() for x in v] for k, v in flat.items()}


def doors(cluster: Any) -> dict[str, Any]:
    """Trains by functions, and is refused a session, and what hosts do differently."""
    autodist = replicator.AutoDist(cluster.devices)
    results: dict[str, Any] = {"functions": trained(autodist)}
    with tf.Graph().as_default(), autodist.scope():
        tf.Variable(1.0)
        results["session"] = _message(autodist.create_distributed_session)
        creator = autodist.session_creator()
        results["creator"] = _message(creator.create_session)

    total = autodist.function(lambda x: tf.reduce_sum(x))
    results["values"] = _message(lambda: total(_X + cluster.host_id))

    @autodist.function
    def inverse(x: tf.Tensor) -> tf.Tensor:
        return tf.linalg.inv(tf.transpose(x) @ x)

    results["failing"] = _message(lambda: inverse(_X * 0.0))
    results["goes on"] = float(tf.reduce_sum(inverse(np.eye(3, dtype=np.float32))))
    return results


def differ(cluster: Any) -> list[str]:
    """Calls another function on each host, of which one was built by both."""
    autodist = replicator.AutoDist(cluster.devices)
    sums = autodist.function(lambda x: tf.reduce_sum(x))
    sums(_X)
    if cluster.host_id:
        return _message(lambda: sums(_X))
    return _message(lambda: autodist.function(lambda x: tf.reduce_max(x))(_X))


# --- Tests ----------------------------------------------------------------------------


@pytest.mark.slow
def test_functions_compute_what_one_device_does_and_sessions_are_refused() -> None:
    first, second = processes.run("test_doors.doors", [1, 2])
    assert first["functions"] == second["functions"]
    for name, expected in trained(None).items():
        for x, y in zip(first["functions"][name], expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    for results in (first, second):
        for name in ("session", "creator"):
            kind, message = results[name]
            assert kind == "ContextError"
            assert "was created in between-graph mode" in message
            assert "doors.py:" in message and "without --mode=between" in message
        kind, message = results["values"]
        assert kind == "MismatchError" and "passes values to a function" in message
        kind, message = results["failing"]
        assert kind == "InvalidArgumentError"
        assert "not invertible" in message and "doors.py:" in message
        assert results["goes on"] == 3.0


@pytest.mark.slow
def test_hosts_that_call_different_functions_do_not_wait_for_one_another() -> None:
    for kind, message in processes.run("test_doors.differ", [1, 1]):
        assert kind == "MismatchError"
        assert "host 1" in message and "runs the function called at" in message
        assert "doors.py:" in message
