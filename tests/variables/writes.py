# SPDX-License-Identifier: Apache-2.0
"""Every way to write a variable, shared by the tests of variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator

START = np.array([1.0, 2.0, 3.0, 4.0], np.float32)

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "assign": lambda v, x: v.assign(x),
    "assign_add": lambda v, x: v.assign_add(x),
    "assign_sub": lambda v, x: v.assign_sub(x),
}
PARTS: dict[str, Callable[[Any, Any], Any]] = {
    "scatter_add": lambda v, x: v.scatter_add(tf.IndexedSlices(x[:2], [3, 1])),
    "scatter_sub": lambda v, x: v.scatter_sub(tf.IndexedSlices(x[:2], [3, 1])),
    "scatter_update": lambda v, x: v.scatter_update(tf.IndexedSlices(x[:2], [3, 1])),
    "scatter_max": lambda v, x: v.scatter_max(tf.IndexedSlices(x[:2], [3, 1])),
    "scatter_min": lambda v, x: v.scatter_min(tf.IndexedSlices(x[:2], [3, 1])),
    "scatter_mul": lambda v, x: v.scatter_mul(tf.IndexedSlices(x[:2], [3, 1])),
    "scatter_div": lambda v, x: v.scatter_div(tf.IndexedSlices(x[:2], [3, 1])),
    "batch_scatter_update": lambda v, x: v.batch_scatter_update(
        tf.IndexedSlices(x[:1], [2])
    ),
    "scatter_nd_add": lambda v, x: v.scatter_nd_add([[3], [1]], x[:2]),
    "scatter_nd_sub": lambda v, x: v.scatter_nd_sub([[3], [1]], x[:2]),
    "scatter_nd_update": lambda v, x: v.scatter_nd_update([[3], [1]], x[:2]),
    "scatter_nd_max": lambda v, x: v.scatter_nd_max([[3], [1]], x[:2]),
    "scatter_nd_min": lambda v, x: v.scatter_nd_min([[3], [1]], x[:2]),
    "slice_assign": lambda v, x: v[1:3].assign(x[:2]),
}
ALL = {**WRITES, **PARTS}

_v1 = tf.compat.v1
# Functions of TensorFlow 1, which write by the handle.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    name: lambda v, name=name: getattr(_v1, name)(
        v, [[0]] if "_nd" in name else [0], [9.0 if "max" in name else 0.5]
    )
    for name in dir(_v1)
    if name.startswith("scatter_") and name not in ("scatter_nd",)
}


def make(repl: replicator.Replicator, value: Any = START, **facts: Any) -> tf.Variable:
    with repl.context():
        return tf.Variable(value, name="weights", **facts)


def written(write: Callable[[Any, Any], Any], start: Any, value: Any) -> np.ndarray:
    """Returns a plain variable's value after a write."""
    plain = tf.Variable(start)
    write(plain, value)
    return plain.numpy()


def own(repl: replicator.Replicator, base: np.ndarray = START) -> tf.Tensor:
    """Returns a value that differs on all replicas."""
    return tf.constant(base) * (repl.replica_id + 2.0)
