"""Initial values of variables in parts: for each part its slice of the whole.

Where what draws the whole can draw a part of it, nothing holds the whole: constants,
and uniform and normal numbers of a stateless generator, with what is computed from
these element by element. All else is drawn whole on the host, and handed on in slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator.graph.passes.rows import offsets_of

HOST = "/device:CPU:0"


def pieces(
    initial_value: Any, dtype: tf.DType | None, axis: int, sizes: Sequence[int]
) -> list[Callable[[], tf.Tensor]]:
    """Returns what each part begins with, as functions to be called one after another.

    Args:
        initial_value: Of the whole: a value, or a function without arguments.
        dtype: Of the variable; None: of the value.
        axis: Along which it is in parts.
        sizes: Of the parts, along the axis.
    """
    with tf.device(None), tf.device(HOST):
        whole = initial_value() if callable(initial_value) else initial_value
        whole = tf.convert_to_tensor(getattr(whole, "wrapped_value", whole), dtype)

    def piece(offset: int, size: int) -> Callable[[], tf.Tensor]:
        begin, length = [0] * whole.shape.rank, whole.shape.as_list()
        begin[axis], length[axis] = offset, size

        def draw() -> tf.Tensor:
            with tf.device(None), tf.device(HOST):
                return tf.slice(whole, begin, length)

        if tf.executing_eagerly():
            return draw
        # A variable of a tf.Graph has what its initial value is made of beside it.
        drawn = draw()
        return lambda: drawn

    return [
        piece(offset, size)
        for offset, size in zip(offsets_of(sizes), sizes, strict=True)
    ]
