# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of several processes: written by the first, restored by all."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests.between import processes


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: pathlib.Path) -> None:
    whole = processes.run("resumed", [1, 1], str(tmp_path / "whole"), "8", "inputs")
    folder = str(tmp_path / "cut")
    first = processes.run("resumed", [1, 1], folder, "5", "inputs")
    second = processes.run("resumed", [1, 1], folder, "8", "inputs")
    assert [result[0] for result in first + second] == [0, 0, 5, 5]
    for cut, rest, uninterrupted in zip(first, second, whole, strict=True):
        assert cut[1] + rest[1] == uninterrupted[1]
        assert rest[2:4] == uninterrupted[2:4]
    assert second[0][4] == [f"ckpt-{n}.index" for n in (5, 6, 8)]
    assert second[1][4] == []  # the first host has all of them
    # A checkpoint of several processes restores in one, and one of fewer does, too.
    v, seen = tf.Variable([0.0] * 3), tf.Variable(0.0)
    path = f"{folder}/host-0/ckpt-8"
    tf.train.Checkpoint(v=v, seen=seen).restore(path).expect_partial()
    np.testing.assert_array_equal(v.numpy(), np.float32(whole[0][2]))
    assert float(seen) == 8 * 2
    (alone,) = processes.run("resumed", [3], folder, "9", "none")
    assert alone[0] == 8 and alone[3] == 8 * 2 + 3
