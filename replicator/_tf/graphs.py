# SPDX-License-Identifier: Apache-2.0
"""Facts about a graph that the public API does not expose."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context as _context
from tensorflow.python.framework import random_seed as _random_seed


def operation_count(graph: tf.Graph) -> int:
    """Returns the number of ops in a graph; `get_operations` would copy the list."""
    return graph.num_operations()


def session_config() -> tf.compat.v1.ConfigProto:
    """Returns the settings of a session that is given none: the process's devices.

    The public API tells of them one by one, not of how GPUs are split.
    """
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(_context.context().config)
    return config


def seeds_counted(graph: tf.Graph) -> int:
    """Returns how many of a graph's ops took their seed from TensorFlow's counter.

    Under a global seed, ops without a seed of their own get the next number.
    """
    return _random_seed._graph_to_seed_dict.get(graph, 0)


def count_seeds_from(graph: tf.Graph, count: int) -> None:
    """Sets the counter from which a graph's ops without a seed take theirs."""
    _random_seed._graph_to_seed_dict[graph] = count


def stands_in(graph: tf.Graph) -> bool:
    """Whether the default graph is `graph`, or a function graph inside of it.

    The outer graph of a function's is an attribute of FuncGraph, which is not public.
    """
    if tf.executing_eagerly():
        return False
    current: Any = tf.compat.v1.get_default_graph()
    while current is not None and current is not graph:
        current = getattr(current, "outer_graph", None)
    return current is not None
