# SPDX-License-Identifier: Apache-2.0
"""all_to_all: slices of equal and of different sizes, there and back again."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers

R = 3
# SPLITS[s][d]: how many rows replica s sends to replica d.
SPLITS = np.array([[2, 0, 1], [0, 0, 4], [3, 1, 0]])


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("known", [True, False], ids=["list", "tensor"])
def test_unequal_splits_with_zeros_among_them(known: bool, mode: str) -> None:
    """And their gradients, which need the sizes as well."""
    parts = [np.random.RandomState(s).rand(sum(SPLITS[s]), 2) for s in range(R)]
    cut = [np.split(x, np.cumsum(n)[:-1]) for x, n in zip(parts, SPLITS, strict=True)]
    repl = helpers.make(R)

    def step() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        r = repl.replica_id
        splits = SPLITS[r].tolist() if known else helpers.opaque(SPLITS[r])
        x = helpers.opaque(parts[r])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_to_all(x, 0, 0, splits)
            loss = (r + 1.0) * tf.reduce_sum(y**3)
        back = repl.all_to_all(y, 0, 0, splits=SPLITS[:, r].tolist())
        return y, back, tape.gradient(loss, x)

    received, back, gradients = helpers.run(mode, repl, lambda: step)
    for d in range(R):
        np.testing.assert_array_equal(received[d], np.concatenate([c[d] for c in cut]))
        np.testing.assert_array_equal(back[d], parts[d])
        weights = np.repeat(np.arange(1.0, R + 1), SPLITS[d])[:, None]
        np.testing.assert_allclose(gradients[d], 3 * weights * parts[d] ** 2)


def test_slices_that_cannot_be_joined_are_an_error_with_both_lines() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        splits = [3, 1] if repl.replica_id else [2, 2]
        return repl.all_to_all(tf.ones([4, 5]), 0, 1, splits)

    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)all_to_all sends replica 0 slices that cannot be joined along "
        r"concat_axis=1.*replica 0 .*test_all_to_all.py.*replica 1 .*Fix: .*equally",
    ):
        repl.run(step)
