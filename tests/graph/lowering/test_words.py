# SPDX-License-Identifier: Apache-2.0
"""Words hold every bit of a tensor, of any dtype and shape."""

from __future__ import annotations

import hypothesis
import hypothesis.extra.numpy as arrays
import ml_dtypes
import numpy as np
import tensorflow as tf

from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering import words

_DTYPES = (
    *(np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64),
    *(np.complex128, np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32),
    *(np.uint32, np.int64, np.uint64),
)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    shape=arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5),
    dtype=hypothesis.strategies.sampled_from(_DTYPES),
    seed=hypothesis.strategies.integers(0, 99),
    known=hypothesis.strategies.booleans(),
)
def test_words_hold_every_bit(shape, dtype, seed, known):
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype is np.bool_:
        data %= 2
    x = np.frombuffer(data.tobytes(), dtype).reshape(shape)
    bits = words.of(tf.constant(x))
    assert bits.dtype == tf.int32 and bits.shape == [-(-count // 4)]
    value = Value(tf.as_dtype(dtype).name, shape if known else (None,) * len(shape))
    given = shape if known else tf.constant(shape, tf.int32, [len(shape)])
    again = words.to_tensor(bits, value, given)
    assert again.dtype == x.dtype and again.shape == x.shape
    assert again.numpy().tobytes() == x.tobytes()
