# SPDX-License-Identifier: Apache-2.0
"""Replaces a constant by another tensor while it is being created."""

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
    """Makes the code that is creating a constant receive another tensor instead.

    Called from a device function, which TensorFlow calls before it returns the constant
    and before it asks op callbacks for a replacement. Public passes over a graph come
    too late: by then the constants of branches, loops and functions are in several
    definitions, each of which holds their bytes.

    Args:
        op: The constant.
        replacement: Returns the new tensor for the constant's value.
    """

    def on_new_op(
        op_type: str,
        inputs: Any,
        attrs: Any,
        outputs: Any,
        op_name: str | None = None,
        graph: tf.Graph | None = None,
    ) -> tuple[tf.Tensor] | None:
        _callbacks.remove_op_callback(on_new_op)
        if graph is None or not outputs or outputs[0].op is not op:
            return None  # created without op callbacks
        value = tf.make_ndarray(attrs[attrs.index("value") + 1].tensor)
        empty_constant(op)
        return (replacement(value),)

    _callbacks.add_op_callback(on_new_op)
