# SPDX-License-Identifier: Apache-2.0
"""Products that are slow on CPUs are transposed, wherever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.graph.passes import kernels
from tests import helpers, sampling

RNG = np.random.default_rng(0)
WEIGHTS = RNG.standard_normal((768, 512))
INPUTS = RNG.standard_normal((2, 8, 768))
COTANGENTS = RNG.standard_normal((2, 8, 512))


@pytest.fixture(name="counts")
def _counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns how many products each call of the pass has transposed so far."""
    counts: list[int] = []
    replace = kernels.replace
    monkeypatch.setattr(kernels, "replace", lambda *of: counts.append(replace(*of)))
    return counts


def _replaced(
    rows: tuple[int | None, int] = (64, 512),
    matrix: tuple[int, int] = (512, 512),
    transpose_a: bool = False,
    transpose_b: bool = True,
    dtype: str = "float32",
    device: str = "CPU:1",
) -> int:
    """Returns how many ops are replaced in a graph with one product."""
    with tf.Graph().as_default() as graph, tf.device(device):
        tf.identity(
            tf.linalg.matmul(
                tf.compat.v1.placeholder(dtype, rows),
                tf.compat.v1.placeholder(dtype, matrix),
                transpose_a=transpose_a,
                transpose_b=transpose_b,
            )
        )
        ops = graph.get_operations()
        return kernels.replace([ops, ops])  # a merged op is one op of all replicas


# Products, and whether they are replaced.
PRODUCTS: dict[str, tuple[dict[str, Any], bool]] = {
    "few rows, a large matrix": ({}, True),
    "a high matrix": ({"matrix": (2048, 512)}, True),
    "a wide matrix": ({"rows": (64, 1024), "matrix": (256, 1024)}, True),
    "float64": ({"dtype": "float64"}, True),
    "16 bits": ({"dtype": "float16"}, False),
    "on a GPU": ({"device": "GPU:0"}, False),
    "many rows": ({"rows": (256, 512)}, False),
    "a small matrix": ({"rows": (16, 256), "matrix": (256, 256)}, False),
    "a narrow matrix": ({"rows": (64, 8192), "matrix": (64, 8192)}, False),
    "unknown rows, a small matrix": (
        {"rows": (None, 256), "matrix": (256, 256)},
        False,
    ),
    "not transposed": ({"transpose_b": False}, False),
    "transposed rows": ({"rows": (512, 64), "transpose_a": True}, False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_few_rows_by_a_large_transposed_matrix_are_transposed(name: str) -> None:
    arguments, replaced = PRODUCTS[name]
    assert _replaced(**arguments) == replaced, name


@pytest.mark.parametrize("is_graph", [False, True])
def test_a_step_decides_when_it_runs_if_rows_are_unknown(is_graph: bool) -> None:
    def product(rows: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:0"):
            result = tf.linalg.matmul(rows, tf.constant(WEIGHTS), transpose_b=True)
        with tf.control_dependencies([result]):
            after = tf.identity(result)
        assert kernels.replace([result.graph.get_operations()]) == 1
        return after

    spec = tf.TensorSpec([None, 512], tf.float64)
    arrays = [RNG.standard_normal((n, 512)) for n in (0, 3, 128, 129, 300)]
    if is_graph:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            rows = tf.compat.v1.placeholder(spec.dtype, spec.shape)
            run = session.make_callable(product(rows), [rows])
            results = list(map(run, arrays))
    else:
        function = tf.function(product, input_signature=[spec], autograph=False)
        results = [function(array).numpy() for array in arrays]
    for array, result in zip(arrays, results, strict=True):
        np.testing.assert_allclose(result, array @ WEIGHTS.T, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rows", [16, None])
def test_a_loop_does_not_decide_in_each_iteration(rows: int | None) -> None:
    weights = tf.constant(WEIGHTS)

    def body(turn: tf.Tensor, x: tf.Tensor) -> Any:
        with tf.device("CPU:0"):
            product = tf.linalg.matmul(x, weights, transpose_b=True)
        return turn + 1, x + tf.reduce_sum(product, 1, keepdims=True)

    @tf.function(input_signature=[tf.TensorSpec([rows, 512], tf.float64)])
    def loop(x: tf.Tensor) -> tf.Tensor:
        _, result = tf.while_loop(lambda turn, x: turn < 2, body, (0, x))
        found.append(kernels.replace([result.graph.get_operations()]))
        return result

    found: list[int] = []
    array = RNG.standard_normal((16, 512))
    want = array
    for _ in range(2):
        want = want + (want @ WEIGHTS.T).sum(1, keepdims=True)
    np.testing.assert_allclose(loop(array), want, rtol=1e-7)
    assert found == [1 if rows else 0]


@pytest.mark.parametrize("on", [True, False])
def test_an_option_leaves_them_as_they_are(on: bool, counts: list[int]) -> None:
    repl = helpers.make(2, kernels=on)
    repl.run(lambda: repl.all_reduce(_product(tf.constant(COTANGENTS)[0])))
    assert counts == [2] * on


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_step_computes_what_plain_tensorflow_does(mode: str) -> None:
    repl = helpers.make(2, kernels=True)

    def make_step() -> Any:
        variable = tf.Variable(WEIGHTS)

        def step_fn() -> tuple[tf.Tensor, tf.Tensor]:
            x = tf.constant(INPUTS)[repl.replica_id]
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum((x @ variable) * COTANGENTS[repl.replica_id])
            gradient = tape.gradient(loss, x)
            with tf.control_dependencies([gradient]):
                variable.assign(variable * 0.5)
            return gradient * 1.0, variable.read_value()

        return step_fn

    gradient, after = helpers.run(mode, repl, make_step)
    for r in range(2):
        np.testing.assert_allclose(gradient[r], COTANGENTS[r] @ WEIGHTS.T, rtol=1e-10)
        np.testing.assert_array_equal(after[r], WEIGHTS * 0.5)


def _product(rows: tf.Tensor) -> tf.Tensor:
    """Returns rows W^T [8, 768], which is slow, of rows [8, 512]."""
    return tf.linalg.matmul(rows, tf.constant(WEIGHTS), transpose_b=True)


def _conditional(rows: tf.Tensor) -> tf.Tensor:
    positive = tf.reduce_sum(tf.square(rows)) > 0
    return tf.cond(positive, lambda: _product(rows), lambda: rows @ WEIGHTS.T * 7)


def _one_of_several(rows: tf.Tensor) -> tf.Tensor:
    branches = [lambda: _product(-rows), lambda: _product(rows)]
    return tf.switch_case(tf.cast(tf.reduce_sum(rows) < 1e9, tf.int32), branches)


def _loop(rows: tf.Tensor) -> tf.Tensor:
    """Sums the product in three thirds."""
    return tf.while_loop(
        lambda i, _: i < 3,
        lambda i, sum: (i + 1, sum + _product(rows / 3)),
        (0, tf.zeros((8, 768), tf.float64)),
    )[1]


def _function(rows: tf.Tensor) -> tf.Tensor:
    return tf.function(_product)(rows)


def _loop_in_a_function(rows: tf.Tensor) -> tf.Tensor:
    return tf.function(_loop)(rows)


def _compiled(rows: tf.Tensor) -> tf.Tensor:
    return tf.function(_product, jit_compile=True)(rows)


INSIDE = [_conditional, _one_of_several, _loop, _function, _loop_in_a_function]


@pytest.mark.battery(3)
@pytest.mark.parametrize(
    ("place", "communicates", "mode"),
    sampling.in_turn(INSIDE, [False, True], helpers.MODES),
)
def test_inside_control_flow(
    place: Callable[[tf.Tensor], tf.Tensor],
    communicates: bool,
    mode: str,
    counts: list[int],
) -> None:
    repl = helpers.make(2, kernels=True)

    def step_fn() -> tf.Tensor:
        rows = tf.constant(COTANGENTS)[repl.replica_id]
        if communicates:
            return _merged(repl, place, rows)
        return place(rows)

    (product,) = helpers.run(mode, repl, lambda: lambda: (step_fn(),))
    want = COTANGENTS @ WEIGHTS.T
    for r in range(2):
        expected = want.sum(0) if communicates else want[r]
        np.testing.assert_allclose(product[r], expected, rtol=1e-9, atol=1e-9)
    assert sum(counts) >= 2


def _merged(
    repl: Any, place: Callable[[tf.Tensor], tf.Tensor], rows: tf.Tensor
) -> tf.Tensor:
    """Does the same in a function in which replicas communicate."""
    return tf.function(lambda rows: repl.all_reduce(place(rows)))(rows)


def test_what_xla_compiles_is_left_alone(counts: list[int]) -> None:
    repl = helpers.make(2, kernels=True)

    def step_fn() -> tuple[tf.Tensor]:
        return (_compiled(tf.constant(COTANGENTS)[repl.replica_id]),)

    (product,) = helpers.run("function", repl, lambda: step_fn)
    for r in range(2):
        np.testing.assert_allclose(product[r], COTANGENTS[r] @ WEIGHTS.T, rtol=1e-9)
    assert counts == [0]


def test_functions_of_whole_batches_have_them_though_rows_vary(
    counts: list[int],
) -> None:
    autodist = replicator.AutoDist(["CPU:0", "CPU:1"], kernels=True)
    function = autodist.function(_product)
    for n in (8, 5, 1):
        rows = RNG.standard_normal((n, 512))
        np.testing.assert_allclose(function(rows), rows @ WEIGHTS.T, rtol=1e-9)
    assert counts == [2, 2]  # each replica's part, and the whole batch of one row
