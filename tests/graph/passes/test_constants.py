"""Large constants of a step are held once, and are what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph.passes import constants
from tests import helpers

_ROWS = constants.LARGE // 4 // 64


def _table(seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).rand(_ROWS, 64).astype(np.float32)


def _size(op: tf.Operation) -> int:
    return op.get_attr("value").ByteSize()


def _bytes_held(graph: tf.Graph) -> int:
    """Returns how many bytes the constants of a graph hold."""
    return sum(_size(op) for op in graph.get_operations() if op.type == "Const")


@pytest.mark.parametrize("build", ["trace", "clone"])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_arrays_are_held_once_and_give_what_they_gave(mode: str, build: str) -> None:
    tables, signs = [_table(0), _table(1)], np.zeros((2, _ROWS, 64), np.float32)
    signs[1] = -0.0  # equal to the other, but not the same bits
    graphs: list[Any] = []
    repl = helpers.make(3, build=build)

    def make_step() -> Any:
        weight = tf.Variable(tf.ones([64, 2]))

        def step_fn() -> Any:
            graphs.append(tf.compat.v1.get_default_graph())
            with tf.GradientTape() as tape:
                hidden = tables[0] @ weight + tf.constant(tables[0]) @ weight
                hidden += tf.constant(tables[1]) @ weight
                loss = repl.all_reduce(tf.reduce_sum(hidden), "mean")
            small = tf.constant([1.0, 2.0])
            # The array itself is returned, and used in a branch and in a gradient.
            branch = tf.cond(
                repl.all_reduce(1.0) > 0.0,
                lambda: repl.all_reduce(hidden),
                lambda: hidden,
            )
            return {
                "loss": loss,
                "gradient": tape.gradient(loss, weight.handle),
                "branch": branch,
                "sign": [tf.math.reciprocal(tf.constant(s)[0, 0]) for s in signs],
                "table": tf.constant(tables[1]),
                "small": small,
            }

        return step_fn

    result = helpers.run(mode, repl, make_step)
    hidden = (2.0 * tables[0] + tables[1]) @ np.ones([64, 2], np.float32)
    for r in range(3):
        np.testing.assert_allclose(result["loss"][r], hidden.sum(), rtol=1e-5)
        columns = (2.0 * tables[0] + tables[1]).sum(axis=0)
        gradient = np.stack([columns] * 2, axis=1)
        np.testing.assert_allclose(result["gradient"][r], gradient, rtol=1e-5)
        np.testing.assert_allclose(result["branch"][r], 3.0 * hidden, rtol=1e-5)
        np.testing.assert_array_equal(result["table"][r], tables[1])
        assert result["sign"][0][r] == np.inf
        if mode == "eager":  # in graphs of ours; TensorFlow's optimizer joins the zeros
            assert result["sign"][1][r] == -np.inf
    if mode == "eager":  # what is returned is each replica's; all else is held outside
        assert _bytes_held(graphs[-1]) < 3 * constants.LARGE + 20_000


def test_only_large_constants_are_shared_and_emptied() -> None:
    held = {}

    def build() -> tf.Tensor:
        graph = tf.compat.v1.get_default_graph()
        made = {
            "small": tf.constant(_table()[:-1]),
            "spared": tf.constant(_table()),
            "one": tf.constant(_table()),
            "equal": tf.constant(_table()),
            "other": tf.constant(_table(1)),
            "unused": tf.constant(_table()),
        }
        used = {k: tf.identity(t) for k, t in made.items() if k != "unused"}
        constants.share(graph, graph.get_operations(), "CPU:0", {id(made["spared"])})
        held.update({k: _size(t.op) for k, t in made.items()})
        sources = {k: t.op.inputs[0] for k, t in used.items()}
        assert all(sources[k] is made[k] for k in ("small", "spared"))
        assert sources["one"] is sources["equal"] is not sources["other"]
        return used["equal"] - used["other"]

    result = tf.function(build, autograph=False)()
    np.testing.assert_array_equal(result, _table() - _table(1))
    assert min(held["small"], held["spared"]) > constants.LARGE / 2
    assert max(held[k] for k in ("one", "equal", "other", "unused")) < 100
