# SPDX-License-Identifier: Apache-2.0
"""Copies share a function if nothing but its devices would differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.graph.passes import kernels
from tests import helpers

v1 = tf.compat.v1


def _elements(ctx: replicator.InputContext) -> tf.Tensor:
    return tf.reshape(tf.range(6.0), [2, 3]) / 7.0 + ctx.replica_id


def _loop(x: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    """The derivative of a loop with a branch, which reads a variable."""

    def turn(n: tf.Tensor, y: tf.Tensor) -> Any:
        y = tf.cond(n % 2 > 0, lambda: tf.tanh(y @ w), lambda: y * tf.reduce_sum(w))
        return n + 1, y

    with tf.GradientTape() as tape:
        tape.watch(x)
        _, y = tf.while_loop(lambda n, _: n < 4, turn, (tf.constant(0), x))
    return tape.gradient(y, x)


def _built(count: int, build: str) -> tuple[tf.Graph, list[tf.Tensor], Any]:
    repl = helpers.make(count, build=build, kernels=False)
    with repl.context():
        w = tf.Variable(np.sin(np.arange(9.0, dtype=np.float32)).reshape(3, 3))
    results = repl.run(lambda x: _loop(x, w), _elements)
    return v1.get_default_graph(), list(results), w.initializer


def _functions(count: int) -> int:
    with tf.Graph().as_default():
        graph, _, _ = _built(count, "clone")
        return len(graph.as_graph_def().library.function)


def test_functions_are_as_many_for_any_number_of_replicas() -> None:
    """Each costs as much as all ops around it: to build, and for the runtime."""
    assert _functions(3) == _functions(6)


def test_each_replica_runs_them_on_its_own_device() -> None:
    found: list[Any] = []
    for build in ("trace", "clone"):
        with tf.Graph().as_default():
            _, results, init = _built(4, build)
            options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE)
            metadata = v1.RunMetadata()
            with v1.Session() as session:
                session.run(init)
                values = session.run(results, options=options, run_metadata=metadata)
        ran = {
            stats.device: sum("while" in node.node_name for node in stats.node_stats)
            for stats in metadata.step_stats.dev_stats
        }
        on = [n for device, n in sorted(ran.items()) if "/device:CPU:" in device]
        found.append((values, [n > 0 for n in on[:4]]))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == [True] * 4


def test_products_in_them_are_transposed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    replace = kernels.replace
    monkeypatch.setattr(kernels, "replace", lambda *of: counts.append(replace(*of)))
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((768, 512))

    def step(rows: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda n, _: n < 2,
            lambda n, y: (n + 1, y + tf.linalg.matmul(rows, matrix, transpose_b=True)),
            (0, tf.zeros((8, 768), tf.float64)),
        )[1]

    with tf.Graph().as_default() as graph:
        repl = helpers.make(5, build="clone", kernels=True)
        inputs = rng.standard_normal((5, 8, 512))
        results = repl.run(step, lambda ctx: tf.constant(inputs[ctx.replica_id]))
        names = [f.signature.name for f in graph.as_graph_def().library.function]
        with v1.Session() as session:
            values = session.run(list(results))
    np.testing.assert_allclose(values, inputs @ matrix.T * 2, rtol=1e-9)
    assert counts == [5]
    assert sum("kernels" in name for name in names) == 2  # of replica 0, and the others
