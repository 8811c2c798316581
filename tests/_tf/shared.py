# SPDX-License-Identifier: Apache-2.0
"""What several of these tests share."""

from __future__ import annotations

import tensorflow as tf


def evaluate(tensor: tf.Tensor, graph: tf.Graph) -> float:
    """Returns the value of a tensor of a plain graph."""
    with tf.compat.v1.Session(graph=graph) as session:
        return float(session.run(tensor))
