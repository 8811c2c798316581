# SPDX-License-Identifier: Apache-2.0
"""Assignments that add to a variable: made in one piece where others write it, too.

Keras counts by `v.assign(v + 1)`. Where several programs share a variable, what another
one adds between the read and the write would be lost.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_SUMS = ("AddV2", "Add")


def addend(variable: Any, value: Any) -> tf.Tensor | None:
    """Returns what an assignment in a step adds to a variable, if that is what it does.

    Args:
        variable: Is assigned.
        value: What is assigned.
    """
    if not tf.is_symbolic_tensor(value) or value.op.type not in _SUMS:
        return None
    one, other = value.op.inputs
    handle = variable.handle
    for read, added in ((one, other), (other, one)):
        if read.op.type == "ReadVariableOp" and read.op.inputs[0] is handle:
            return tf.broadcast_to(added, tf.shape(read))
    return None
