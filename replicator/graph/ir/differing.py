# SPDX-License-Identifier: Apache-2.0
"""Constants of the library that differ between replicas, like a replica's position.

Such a constant carries the values of all replicas in an attribute, from which
build="clone" gives each copy its value. Constants of users carry no such attribute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import ops

ATTRIBUTE = "_replicator_values"


def constant(values: Sequence[bool] | Sequence[int], replica_id: int) -> tf.Tensor:
    """Returns a constant that is `values[r]` on replica r: a bool or int32 scalar.

    Args:
        values: One per replica of the world; those of replicas that do not take part
            are never used.
        replica_id: The replica being built.
    """
    tensor = tf.constant(values[replica_id])
    ops.set_ints_attr(tensor.op, ATTRIBUTE, [int(value) for value in values])
    return tensor


def give(node: Any, replica_id: int) -> bool:
    """Gives a copy of such a constant the value of its replica.

    Args:
        node: The NodeDef of the copy, which is changed.
        replica_id: The replica that the copy belongs to.

    Returns:
        Whether the node is such a constant; others are left unchanged.
    """
    if ATTRIBUTE not in node.attr:
        return False
    values, dtype = node.attr[ATTRIBUTE].list.i, tf.as_dtype(node.attr["dtype"].type)
    value = dtype.as_numpy_dtype(values[replica_id])
    node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, dtype))
    return True
