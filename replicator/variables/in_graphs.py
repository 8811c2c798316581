# SPDX-License-Identifier: Apache-2.0
"""Variables in a tf.Graph: their collections, initializers, and what orders writes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def collect(variable: Any, collections: Sequence[str] | None) -> None:
    """Adds a new variable to the collections of its tf.Graph, if it is in one.

    Args:
        variable: The variable.
        collections: The collections; None: where TensorFlow 1 keeps all variables.
            Trainable variables are also added to the collection of those.
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
    initializers = dict.fromkeys(variable.initializer for variable in variables)
    return tf.group(*initializers, name="initialize")


def known_before(*values: Any) -> contextlib.AbstractContextManager[None]:
    """Returns a block whose ops run after all of these values are known.

    In a session, nothing else orders the reads of a variable that a value is computed
    of, and the writes of components that do not depend on the value.

    Args:
        *values: Nests of tensors, or of anything else.
    """
    parts = [
        (leaf.values, leaf.indices) if isinstance(leaf, tf.IndexedSlices) else leaf
        for leaf in tf.nest.flatten(values)
    ]
    leaves = tf.nest.flatten(parts)
    tensors: Any = [leaf for leaf in leaves if tf.is_symbolic_tensor(leaf)]
    return tf.control_dependencies(tensors)
