# SPDX-License-Identifier: Apache-2.0
"""Gradients are in the positions of the tensors through which they flow."""

from __future__ import annotations

import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from replicator.primitives import flows

DTYPES = [tf.float16, tf.bfloat16, tf.float64, tf.complex64, tf.int32, tf.bool]


@settings(deadline=None)
@given(dtypes=st.lists(st.sampled_from(DTYPES), max_size=6))
def test_what_is_spread_is_where_tensorflow_has_gradients(
    dtypes: list[tf.DType],
) -> None:
    tensors = [tf.zeros([2], dtype) for dtype in dtypes]
    with tf.GradientTape() as tape:
        tape.watch([t for t in tensors if t.dtype.is_floating or t.dtype.is_complex])
        copies = [tf.identity(tensor) for tensor in tensors]
    expected = tape.gradient(copies, tensors) if tensors else []
    gradients = [gradient for gradient in expected if gradient is not None]
    assert len(flows.places(tensors)) == len(gradients)
    spread = flows.spread(gradients, flows.places(tensors), len(tensors))
    for one, two in zip(spread, expected, strict=True):
        assert one is two
