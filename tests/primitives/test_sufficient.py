# SPDX-License-Identifier: Apache-2.0
"""Sums of matrix products by their factors: equal to NumPy, equal bits everywhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.costs import cost
from tests import helpers

LARGE = 320  # widths at which sending factors pays off, for few or unknown rows


def _make(num_replicas: int, factors: bool = True) -> replicator.Replicator:
    """Returns a Replicator that reduces tensors without factors on a hub."""
    return helpers.make(num_replicas, factors=factors, algorithm="hub")


def _numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _dense_gradients(
    repl: replicator.Replicator, op: str = "mean", rows: Any = 3, widths: Any = LARGE
) -> Callable[[], Any]:
    """Returns a step that reduces the gradients of a dense layer."""

    def step() -> Any:
        r = repl.replica_id
        count = rows[r] if isinstance(rows, tuple) else rows
        x = helpers.opaque(_numbers(count, widths, seed=r), [None, widths])
        dy = helpers.opaque(_numbers(count, widths, seed=r + 50), [None, widths])
        weights = tf.matmul(x, dy, transpose_a=True)
        return repl.all_reduce([weights, tf.reduce_sum(dy, 0)], op)

    return step


def _expected(op: str, rows: tuple[int, ...], widths: int = LARGE) -> list[np.ndarray]:
    x = [_numbers(n, widths, seed=r) for r, n in enumerate(rows)]
    dy = [_numbers(n, widths, seed=r + 50) for r, n in enumerate(rows)]
    scale = 1 / len(rows) if op == "mean" else 1
    return [
        scale * (np.concatenate(x).T @ np.concatenate(dy)),
        scale * np.concatenate(dy).sum(0),
    ]


def _algorithms(repl: replicator.Replicator, step: Any) -> list[str]:
    return [row.algorithm for row in repl.build(step).plan]


def _ops(repl: replicator.Replicator, step: Any) -> list[tf.Operation]:
    """Returns the ops that run to fetch a step's results in a graph."""
    with tf.Graph().as_default():
        return helpers.ops_run(repl.run(step))


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("rows", [(3, 3), (1, 4, 2), (0, 2)], ids=str)
def test_values_and_bits(mode: str, op: str, rows: tuple[int, ...]) -> None:
    repl = _make(len(rows))
    results = helpers.run(mode, repl, lambda: _dense_gradients(repl, op, rows))
    for received, expected in zip(results, _expected(op, rows), strict=True):
        assert len({np.asarray(x).tobytes() for x in received}) == 1
        np.testing.assert_allclose(received[0], expected, atol=1e-5)


def test_the_plan_shows_that_factors_move() -> None:
    repl, plain = (_make(2, factors=on) for on in (True, False))
    assert _algorithms(repl, _dense_gradients(repl)) == ["factors"]
    assert _algorithms(plain, _dense_gradients(plain)) == ["hub"]


def test_the_plan_counts_the_bytes_that_move() -> None:
    repl = _make(2)

    def step() -> Any:
        x, dy = (helpers.opaque(_numbers(3, LARGE, seed=s)) for s in (1, 2))
        loss = repl.all_reduce(tf.reduce_sum(x))
        product = tf.matmul(x, dy + loss, transpose_a=True)
        return repl.all_reduce(product), repl.all_reduce(tf.reduce_sum(product[0]))

    def only_factors() -> Any:
        x, dy = (helpers.opaque(_numbers(3, LARGE, seed=s)) for s in (1, 2))
        loss = repl.all_reduce(tf.reduce_sum(x))
        return repl.all_reduce(tf.matmul(x, dy + loss, transpose_a=True))

    thin, product = 4 * 3 * LARGE, 4 * LARGE * LARGE
    _, row = repl.build(only_factors).plan
    assert sorted(link.nbytes for link in row.links) == [2 * thin, product]
    _, read_elsewhere, _ = repl.build(step).plan
    assert [link.nbytes for link in read_elsewhere.links] == [product] * 2


def test_each_product_is_made_once_and_nothing_passes_over_it_again() -> None:
    repl = _make(3)
    ops = _ops(repl, _dense_gradients(repl, "mean"))
    assert [op.type for op in ops].count("MatMul") == 1
    readers = {
        op.type for op in ops for tensor in op.inputs if tensor.shape == (LARGE, LARGE)
    }
    # None of which copies anything.
    assert readers <= {"Identity", "StopGradient", "PlaceholderWithDefault"}


def test_factors_that_products_share_are_joined_once() -> None:
    repl = _make(2)

    def step() -> Any:
        x, *dys = (helpers.opaque(_numbers(3, LARGE, seed=s)) for s in range(4))
        return repl.all_reduce([tf.matmul(x, dy, transpose_a=True) for dy in dys])

    types = [op.type for op in _ops(repl, step)]
    assert types.count("MatMul") == 3
    assert types.count("ConcatV2") == 4


def test_products_that_share_a_factor_keep_their_scales() -> None:
    def step(repl: replicator.Replicator) -> Any:
        *xs, dy = (helpers.opaque(_numbers(3, LARGE, seed=s)) for s in range(3))
        products = [tf.matmul(x, dy, transpose_a=True) for x in xs]
        return repl.all_reduce([2.0 * products[0], 3.0 * products[1]])

    moved, plain = (
        repl.run(functools.partial(step, repl))
        for repl in (_make(2, factors=on) for on in (True, False))
    )
    for one, other in zip(moved, plain, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=1e-4)


def test_a_product_that_is_returned_too_is_reduced_as_it_is() -> None:
    repl = _make(2)

    def step() -> Any:
        x, dy = (
            tf.cast(helpers.opaque(_numbers(3, LARGE, seed=s)), tf.float16)
            for s in (1, 2)
        )
        product = tf.cast(tf.matmul(x, dy, transpose_a=True), tf.float32)
        return product, repl.all_reduce(product)

    assert _algorithms(repl, step) == ["hub"]


def test_a_product_that_is_fetched_too_has_its_value() -> None:
    repl = _make(2)
    gradients = []

    def step() -> Any:
        x = helpers.opaque(_numbers(3, LARGE, seed=repl.replica_id))
        gradients.append(tf.matmul(x, x, transpose_a=True))
        return repl.all_reduce(gradients[-1])

    with tf.Graph().as_default(), helpers.session() as session:
        total = repl.run(step)[0]
        own, total = session.run([gradients, total])
    np.testing.assert_allclose(sum(own), total, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    {
        "scale of its own": lambda p, r: p * helpers.opaque(np.float32(r + 2)),
        "the same scale": lambda p, r: p * 0.25,
        "divided": lambda p, r: p / helpers.opaque(np.float32(r + 2)),
        "several": lambda p, r: tf.reshape(tf.transpose(p * 3.0) / (r + 1.0), [-1]),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_is_done_to_the_products_is_done_to_their_sum(change: Any) -> None:
    def step() -> Any:
        x = helpers.opaque(_numbers(3, LARGE, seed=repl.replica_id))
        dy = helpers.opaque(_numbers(3, 2 * LARGE, seed=repl.replica_id + 50))
        product = tf.matmul(x, dy, transpose_a=True)
        return repl.all_reduce([change[1](product, repl.replica_id)], "mean")[0]

    received = []
    for on in (True, False):
        repl = _make(2, factors=on)
        assert _algorithms(repl, step) == ["factors" if on else "hub"]
        received.append(repl.run(step)[0])
    assert received[0].dtype == received[1].dtype
    np.testing.assert_allclose(received[0], received[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-60, 1e60])
def test_products_cast_to_more_digits_are_summed_with_them(scale: float) -> None:
    """And in the range of the wider dtype."""
    repl = _make(3)

    def step() -> Any:
        x = helpers.opaque(_numbers(3, LARGE, seed=repl.replica_id))
        product = tf.matmul(x, x, transpose_a=True)
        return repl.all_reduce(tf.cast(product, tf.float64) * scale)

    parts = [_numbers(3, LARGE, seed=r) for r in range(3)]
    exact = sum(x.T.astype(np.float64) @ x for x in parts)
    np.testing.assert_allclose(repl.run(step)[0] / scale, exact, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", [True, False])
def test_16_bit_products_are_added_up_in_float32(dtype: str, wide: bool) -> None:
    repl = _make(2)

    def step() -> Any:
        r = repl.replica_id
        x = tf.cast(helpers.opaque(_numbers(3, LARGE, seed=r)), dtype)
        dy = tf.cast(helpers.opaque(_numbers(3, LARGE, seed=r + 50)), dtype)
        product = tf.matmul(x, dy, transpose_a=True)
        return repl.all_reduce(tf.cast(product, tf.float32) if wide else product)

    assert _algorithms(repl, step) == ["factors"]
    result = repl.run(step)[0]
    x, dy = (
        np.concatenate(
            [tf.cast(tf.cast(_numbers(3, LARGE, seed=s), dtype), "float32") for s in at]
        )
        for at in ((0, 1), (50, 51))
    )
    assert result.dtype == ("float32" if wide else dtype)
    exact = tf.cast(x.T @ dy, result.dtype)
    tolerance = 1e-5 if wide else {"float16": 1e-2, "bfloat16": 8e-2}[dtype]
    np.testing.assert_allclose(
        tf.cast(result, "float32"), tf.cast(exact, "float32"), atol=tolerance
    )


def test_inside_loops_and_conditionals() -> None:
    def step() -> Any:
        x = helpers.opaque(_numbers(3, LARGE, seed=repl.replica_id))

        def turn(n: tf.Tensor, total: tf.Tensor) -> Any:
            product = tf.matmul(x * tf.cast(n, tf.float32), x, transpose_a=True)
            return n + 1, total + repl.all_reduce(product, "mean")

        _, total = tf.while_loop(
            lambda n, _: n < 4, turn, [1, tf.zeros([LARGE, LARGE])]
        )
        return tf.cond(
            tf.reduce_all(tf.math.is_finite(total)),
            lambda: repl.all_reduce(tf.matmul(x, x, transpose_a=True)) + total,
            lambda: total,
        )

    received = []
    for on in (True, False):
        repl = _make(2, factors=on)
        kinds = set(_algorithms(repl, step))
        assert ("factors" in kinds) == on
        received.append(repl.run(step)[0])
    np.testing.assert_allclose(received[0], received[1], atol=1e-4)


def test_where_devices_share_no_memory_each_one_multiplies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cost, "share_memory", lambda devices: False)
    repl = _make(3)
    results = helpers.run(
        "eager", repl, lambda: _dense_gradients(repl, "mean", (1, 2, 3))
    )
    for received, expected in zip(results, _expected("mean", (1, 2, 3)), strict=True):
        assert len({np.asarray(x).tobytes() for x in received}) == 1
        np.testing.assert_allclose(received[0], expected, atol=1e-5)
    (row,) = repl.build(_dense_gradients(repl)).plan
    assert all(link.nbytes is None for link in row.links)  # no product: unknown rows


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
    rows=st.lists(st.integers(0, 5), min_size=2, max_size=4),
    flips=st.tuples(*[st.booleans()] * 3),
    scale=st.sampled_from([None, 0.0, -1.5]),
    op=st.sampled_from(["sum", "mean"]),
)
def test_any_product(rows: Any, flips: Any, scale: Any, op: str) -> None:
    repl = _make(len(rows))
    m, n = LARGE, LARGE + 8
    flip_left, flip_right, flip_product = flips

    def operands(r: int) -> tuple[np.ndarray, np.ndarray]:
        return _numbers(rows[r], m, seed=r), _numbers(rows[r], n, seed=r + 50)

    def step() -> Any:
        left, right = operands(repl.replica_id)
        left = helpers.opaque(left if flip_left else left.T)
        right = helpers.opaque(right.T if flip_right else right)
        product = tf.matmul(left, right, transpose_a=flip_left, transpose_b=flip_right)
        if scale is not None:
            product *= scale
        return repl.all_reduce(tf.transpose(product) if flip_product else product, op)

    assert _algorithms(repl, step) == ["factors"]
    received = repl.run(step)
    expected = sum(left.T @ right for left, right in map(operands, range(len(rows))))
    expected = expected * (1 if scale is None else scale)
    expected = expected / (len(rows) if op == "mean" else 1)
    assert len({x.numpy().tobytes() for x in received}) == 1
    np.testing.assert_allclose(
        received[0], expected.T if flip_product else expected, atol=1e-4
    )


@pytest.mark.parametrize("rank", [2, 3])
def test_a_keras_layer_trains_as_on_one_device(rank: int) -> None:
    shape = (6, 4)[: rank - 1]
    x = _numbers(2, 5, *shape[:-1], LARGE)
    start = _numbers(LARGE, LARGE, seed=9) / 16

    def layer() -> Any:
        made = tf.keras.Sequential(
            [tf.keras.Input(x.shape[2:]), tf.keras.layers.Dense(LARGE, "tanh")]
        )
        made.set_weights([start, start[0]])
        return made, tf.keras.optimizers.SGD(0.1, momentum=0.9)

    def update(model: Any, optimizer: Any, batch: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch)))
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    alone = layer()
    repl = _make(2)
    with repl.context():
        model, optimizer = layer()
        wrapped = repl.wrap_optimizer(optimizer)

    def step() -> None:
        update(model, wrapped, tf.gather(x, repl.replica_id))

    assert _algorithms(repl, step) == ["factors"]
    for _ in range(3):
        update(*alone, np.concatenate(x))
        repl.run(step)
    helpers.assert_replicas_equal(model.trainable_variables)
    for ours, theirs in zip(model.get_weights(), alone[0].get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
