"""The dual of all_gather: each replica's slice of the sum."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers

R = 3
SIZES = [2, 0, 3]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_each_replica_receives_its_slice_of_the_sum(axis: int) -> None:
    repl = helpers.make(R)
    shape = [4, 4]
    shape[axis] = sum(SIZES)
    values = np.random.default_rng(0).standard_normal([R, *shape]).astype(np.float32)

    def step() -> tf.Tensor:
        own = list(shape)
        own[axis] = SIZES[repl.replica_id]
        x = helpers.opaque(tf.zeros(own))
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = repl.all_gather(x, axis)
            product = tf.reduce_sum(gathered * tf.gather(values, repl.replica_id))
        return tape.gradient(product, x)

    total = (values[0] + values[1]) + values[2]
    expected = np.split(total, np.cumsum(SIZES)[:-1], axis)
    for piece, slice_ in zip(repl.run(step), expected, strict=True):
        np.testing.assert_array_equal(piece, slice_)


def test_gathering_is_its_gradient_and_the_other_way_round() -> None:
    """<all_gather(x), y> summed over replicas is <x, reduce_scatter(y)>."""
    repl = helpers.make(R)
    rng = np.random.default_rng(1)
    xs = [rng.standard_normal([size, 2]).astype(np.float32) for size in SIZES]
    ys = rng.standard_normal([R, sum(SIZES), 2]).astype(np.float32)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        x = helpers.opaque(tf.constant(xs[repl.replica_id]))
        with tf.GradientTape() as tape:
            tape.watch(x)
            gathered = repl.all_gather(x, axis=0)
            product = tf.reduce_sum(gathered * ys[repl.replica_id])
        back = tape.gradient(product, x)
        return product, tf.reduce_sum(back * x)

    products, duals = repl.run(step)
    np.testing.assert_allclose(np.sum(products), np.sum(duals), rtol=1e-5)
