# SPDX-License-Identifier: Apache-2.0
"""What a tf.Graph knows of its variables: in which collections, and how they begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def collect(variable: Any, collections: Sequence[str] | None) -> None:
    """Adds a new variable to the collections of its tf.Graph, if it is in one.

    Args:
        variable: The variable.
        collections: Which; None: where TensorFlow 1 looks for all variables. Those that
            are trainable are also put where it looks for these.
    """
    if tf.executing_eagerly():
        return
    if collections is None:
        collections = [tf.compat.v1.GraphKeys.GLOBAL_VARIABLES]
    if variable.trainable:
        trainable = tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES
        collections = list(dict.fromkeys([*collections, trainable]))
    variable.graph.add_to_collections(collections, variable)


def initializer(variables: Sequence[tf.Variable]) -> tf.Operation:
    """Returns the op that initializes several variables, in a tf.Graph."""
    initializers = dict.fromkeys(one.initializer for one in variables)
    return tf.group(*initializers, name="initialize")
