# SPDX-License-Identifier: Apache-2.0
"""Sums in slices: total and rounding errors add up to what float32 would have given."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator import compressors
from replicator.compressors import slices
from tests import helpers


class _InSlices(compressors.Compressor):
    """Sums by `slices.add_up`, and keeps what it says of its rounding."""

    def __init__(self, dtype: tf.DType) -> None:
        self._dtype = dtype
        self.errors: list[list[tf.Tensor]] = []

    def reduce(
        self, tensors: Sequence[tf.Tensor], link: compressors.Link
    ) -> compressors.Sums:
        small = [tf.cast(tensor, self._dtype) for tensor in tensors]
        totals, errors = slices.add_up(small, link)
        self.errors.append(errors)
        return compressors.Sums([tf.cast(x, tf.float32) for x in totals], tensors)


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
@pytest.mark.parametrize("replicas", [2, 3])
def test_totals_and_errors_add_up_to_the_exact_sum(
    replicas: int, dtype: tf.DType
) -> None:
    # Of small integers, float32's sum has no error of its own; 16 bits round it.
    shapes = ((7, 5), (), (0, 3), (4,))
    rng = np.random.default_rng(0)
    values = [rng.integers(-2000, 2000, [replicas, *s]).astype("f") for s in shapes]
    repl = helpers.make(replicas)
    adding = _InSlices(dtype)

    def step_fn() -> list[tf.Tensor]:
        mine = [tf.gather(value, repl.replica_id) for value in values]
        sums = repl.all_reduce(mine, compressor=adding)
        return [*sums, *adding.errors[-1]]

    results = [np.stack([np.asarray(x) for x in each]) for each in repl.run(step_fn)]
    totals, errors = results[: len(shapes)], results[len(shapes) :]
    small = [tf.cast(tf.cast(v, dtype), tf.float32).numpy() for v in values]
    for value, total, error in zip(small, totals, errors, strict=True):
        np.testing.assert_array_equal(total, np.stack([total[0]] * replicas))
        np.testing.assert_array_equal(total[0] + error.sum(0), value.sum(0))
    assert np.abs(errors[0]).sum() > 0  # else this test shows nothing


@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
@given(value=st.floats(width=32))
@settings(max_examples=50, deadline=None)
def test_what_is_finite_stays_finite(dtype: tf.DType, value: float) -> None:
    actual = float(slices.narrow(tf.constant(value, tf.float32), dtype))
    assert np.isfinite(actual) == np.isfinite(value)
    assert np.isnan(actual) == np.isnan(value)
    if not np.isnan(value):
        assert np.sign(actual) in (np.sign(value), 0.0)
