# SPDX-License-Identifier: Apache-2.0
"""Turns v.assign(v + x) into an atomic addition where other programs also write v.

Keras counts by `v.assign(v + 1)`. If several programs share a variable, additions by
another one between the read and the write would be lost.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_SUMS = ("AddV2", "Add")


def addend(variable: Any, value: Any) -> tf.Tensor | None:
    """Returns what an assignment in a step adds to a variable, or None if it does not.

    Args:
        variable: The variable that is assigned to.
        value: The value that is assigned.
    """
    if not tf.is_symbolic_tensor(value) or value.op.type not in _SUMS:
        return None
    left, right = value.op.inputs
    handle = variable.handle
    for read, delta in ((left, right), (right, left)):
        if read.op.type == "ReadVariableOp" and read.op.inputs[0] is handle:
            return tf.broadcast_to(delta, tf.shape(read))
    return None
