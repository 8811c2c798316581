"""Products of few rows with a large transposed matrix, turned around."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph import products
from tests import helpers

RNG = np.random.default_rng(0)


def _turned(
    rows: tuple[int | None, int],
    matrix: tuple[int, int],
    dtype: str = "float32",
    device: str = "CPU:1",
    transpose_b: bool = True,
) -> int:
    """Returns how many products of a graph with one are turned around."""
    with tf.Graph().as_default() as graph, tf.device(device):
        product = tf.linalg.matmul(
            tf.compat.v1.placeholder(dtype, rows),
            tf.compat.v1.placeholder(dtype, matrix),
            transpose_b=transpose_b,
        )
        tf.identity(product)
        return products.turn([[], graph.get_operations()])


def test_few_rows_and_a_large_matrix() -> None:
    assert _turned((64, 512), (512, 512)) == 1
    assert _turned((64, 512), (2048, 512), "float64") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"rows": (256, 512), "matrix": (512, 512)},
        {"rows": (16, 256), "matrix": (256, 256)},
        {"rows": (64, 8192), "matrix": (64, 8192)},
        {"rows": (None, 512), "matrix": (512, 512)},
        {"rows": (64, 512), "matrix": (512, 512), "dtype": "float16"},
        {"rows": (64, 512), "matrix": (512, 512), "device": "GPU:0"},
        {"rows": (64, 512), "matrix": (512, 512), "transpose_b": False},
    ],
    ids=str,
)
def test_others_are_left_alone(arguments: dict[str, Any]) -> None:
    assert _turned(**arguments) == 0


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_gradient_by_inputs_is_that_of_plain_tensorflow(mode: str) -> None:
    repl = helpers.make(2)
    weights = RNG.standard_normal((768, 512))
    inputs = RNG.standard_normal((2, 8, 768))
    cotangents = RNG.standard_normal((2, 8, 512))

    def make_step() -> Any:
        variable = tf.Variable(weights)

        def step_fn() -> tuple[tf.Tensor, tf.Tensor]:
            x = tf.constant(inputs)[repl.replica_id]
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum((x @ variable) * cotangents[repl.replica_id])
            gradient = tape.gradient(loss, x)
            with tf.control_dependencies([gradient]):
                variable.assign(variable * 0.5)
            return gradient * 1.0, variable.read_value()

        return step_fn

    gradient, after = helpers.run(mode, repl, make_step)
    for r in range(2):
        np.testing.assert_allclose(gradient[r], cotangents[r] @ weights.T, rtol=1e-10)
        np.testing.assert_array_equal(after[r], weights * 0.5)
