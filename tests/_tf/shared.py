# SPDX-License-Identifier: Apache-2.0
"""Helpers of several of these tests."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator._tf import choice
from replicator.graph.order import ordering


def evaluate(tensor: tf.Tensor, graph: tf.Graph) -> float:
    """Returns the value of a tensor of a plain graph."""
    with tf.compat.v1.Session(graph=graph) as session:
        return float(session.run(tensor))


def traced(build: Callable[[], Any]) -> Any:
    """Returns a function traced like a step."""
    return choice.trace(build, ordering.order_as_created)
