# SPDX-License-Identifier: Apache-2.0
"""Initial values of variables in parts: each part gets its slice of the whole.

The whole is made on the host, once, and lives there until its parts are created.
Drawing each part by itself would need half of that memory, but has to know how every
generator counts: one that counts otherwise begins with other values, without an error.
It is also slow, as each variable's initial value has to be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator.graph.passes.rows import Parts, offsets_of

HOST = "/device:CPU:0"


def pieces(
    initial_value: Any, dtype: tf.DType | None, layout: Parts
) -> list[Callable[[], tf.Tensor]]:
    """Returns functions that return each part's initial value.

    Args:
        initial_value: The whole initial value, or a function without arguments.
        dtype: The variable's dtype; None means the value's.
        layout: How the variable is divided.
    """
    with tf.device(None), tf.device(HOST):
        whole = initial_value() if callable(initial_value) else initial_value
        whole = tf.convert_to_tensor(getattr(whole, "wrapped_value", whole), dtype)
    bounds = zip(offsets_of(layout.sizes), layout.sizes, strict=True)
    return [_slicer(whole, layout.axis, *piece) for piece in bounds]


def _slicer(
    whole: tf.Tensor, axis: int, offset: int, size: int
) -> Callable[[], tf.Tensor]:
    """Returns a function that slices a value on the host."""
    begin, length = [0] * whole.shape.rank, whole.shape.as_list()
    begin[axis], length[axis] = offset, size

    def draw() -> tf.Tensor:
        with tf.device(None), tf.device(HOST):
            return tf.slice(whole, begin, length)

    if tf.executing_eagerly():
        return draw
    # In a tf.Graph, the inputs of an initial value lie beside the variable.
    drawn = draw()
    return lambda: drawn
