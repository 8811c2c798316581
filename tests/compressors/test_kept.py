# SPDX-License-Identifier: Apache-2.0
"""Kept: what compressors of all_reduce keep, per call, and in checkpoints."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import compressors
from tests import helpers


@pytest.mark.parametrize("compressor", ["ef(int8)", "ef(powersgd(rank=2))", "int8"])
def test_all_reduce_goes_on_to_the_bit_with_what_is_kept(
    compressor: str, tmp_path: pathlib.Path
) -> None:
    values = np.random.default_rng(0).standard_normal([4, 2, 20, 30]).astype("f")

    def run(repl: replicator.Replicator, kept: Any, steps: range) -> list[bytes]:
        def step_fn(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            one = repl.all_reduce(x, "mean", compressor=kept)
            return one, repl.all_reduce(x * x, compressor=kept)

        received = []
        for number in steps:
            given = replicator.PerReplica(*map(tf.constant, values[number]))
            received += repl.run(step_fn, args=[given])
        return [x[0].numpy().tobytes() for x in received]

    repl, kept = helpers.make(2), compressors.Kept(compressor)
    run(repl, kept, range(2))
    path = tf.train.Checkpoint(kept=kept).write(str(tmp_path / "x"))
    expected = run(repl, kept, range(2, 4))
    again = compressors.Kept(compressor)
    status = tf.train.Checkpoint(kept=again).read(path)
    assert run(helpers.make(2), again, range(2, 4)) == expected
    status.assert_consumed()


@pytest.mark.parametrize("mode", helpers.MODES)
def test_what_is_kept_is_of_one_call(mode: str) -> None:
    """By the n-th call on each replica; each graph has its own."""
    repl = helpers.make(2)

    def make_step() -> Any:
        kept = compressors.Kept("ef(topk(ratio=0.5))")

        def step_fn() -> tuple[tf.Tensor, tf.Tensor]:
            x = tf.constant([3.0, 2.0])
            one = repl.all_reduce(x, compressor=kept)
            return one, repl.all_reduce(-2 * x, compressor=kept)

        return step_fn

    one, two = helpers.run(mode, repl, make_step, steps=2)
    np.testing.assert_array_equal(one, [[0.0, 8.0]] * 2)
    np.testing.assert_array_equal(two, [[0.0, -16.0]] * 2)


def test_what_cannot_be_kept() -> None:
    with pytest.raises(replicator.ArgumentError, match="has nothing to keep"):
        compressors.Kept("none")
    with pytest.raises(replicator.ArgumentError, match="use one of"):
        compressors.Kept("gzip")
    kept = compressors.Kept("ef(topk)")
    with pytest.raises(replicator.ArgumentError, match="A Kept is for all_reduce"):
        helpers.make(2).wrap_optimizer(tf.keras.optimizers.SGD(0.1), compressor=kept)


@pytest.mark.parametrize(("size", "dtype"), [(3, "float32"), (2, "float64")])
def test_what_is_kept_of_one_step_does_not_fit_another(size: int, dtype: str) -> None:
    other = tf.ones([size], dtype)
    repl, kept = helpers.make(2), compressors.Kept("ef(topk(ratio=0.5))")
    repl.run(lambda: repl.all_reduce(tf.ones([2]), compressor=kept))
    with pytest.raises(replicator.ArgumentError, match="(?s)residual.*Kept of its"):
        repl.run(lambda: repl.all_reduce(other, compressor=kept))
