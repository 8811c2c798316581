"""Tells of each constant that is put into a graph, and lets others take its place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks as _callbacks

from replicator._tf.ops import empty_constant

_NEEDED = (_callbacks.add_op_callback, _callbacks.remove_op_callback)


@contextlib.contextmanager
def replacing_constants(
    is_meant: Callable[[tf.Tensor], bool],
    replacement: Callable[[np.ndarray], tf.Tensor | None],
) -> Iterator[None]:
    """In this block, constants give way to others as soon as they are in a graph.

    Public passes over a graph come too late: by then the constants of branches, loops
    and functions are in several definitions, each of which holds their bytes.

    Args:
        is_meant: Whether a constant is asked for at all, by its dtype and shape.
        replacement: Returns what takes the place of a value, in the graph that is the
            default then; None if the constant stays.
    """

    def called(
        op_type: str,
        inputs: Any,
        attrs: Any,
        outputs: Any,
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> tuple[tf.Tensor] | None:
        if op_type != "Const" or graph is None:
            return None
        if not outputs or not is_meant(outputs[0]):  # another callback may leave none
            return None
        value = attrs[attrs.index("value") + 1].tensor
        other = replacement(tf.make_ndarray(value))
        if other is None:
            return None
        empty_constant(outputs[0].op)
        return (other,)

    _callbacks.add_op_callback(called)
    try:
        yield
    finally:
        _callbacks.remove_op_callback(called)
