# SPDX-License-Identifier: Apache-2.0
"""Lets a tensor take the place of a constant that is being made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_callbacks as _callbacks

from replicator._tf.ops import empty_constant

_NEEDED = (_callbacks.add_op_callback, _callbacks.remove_op_callback)


def replace_new_constant(
    op: tf.Operation, replacement: Callable[[np.ndarray], tf.Tensor]
) -> None:
    """Lets another tensor take the place of a constant, for whoever asked for it.

    A device function calls this, which TensorFlow calls before it returns the constant,
    and before it asks callbacks on ops whether to return another tensor. Public passes
    over a graph come too late: by then the constants of branches, loops and functions
    are in several definitions, each of which holds their bytes.

    Args:
        op: The constant.
        replacement: Returns what takes the place of its value.
    """

    def called(
        op_type: str,
        inputs: Any,
        attrs: Any,
        outputs: Any,
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> tuple[tf.Tensor] | None:
        _callbacks.remove_op_callback(called)
        if graph is None or not outputs or outputs[0].op is not op:
            return None  # the constant was made in a way that asks no callbacks
        value = tf.make_ndarray(attrs[attrs.index("value") + 1].tensor)
        empty_constant(op)
        return (replacement(value),)

    _callbacks.add_op_callback(called)
