# SPDX-License-Identifier: Apache-2.0
"""Variables in a tf.Graph: their collections, initializers, and what orders writes."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import ops as tf_ops


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


def assert_initialized(
    variables: Collection[Any], ops: Collection[tf.Operation]
) -> None:
    """Makes a step in a tf.Graph assert that all components have values.

    Args:
        variables: ReplicatedVariables that the step uses.
        ops: Its ops, which wait for the assertion if they use a component.
    """
    names = ", ".join(dict.fromkeys(variable.name for variable in variables))
    handles = {
        id(component.handle): component.handle
        for variable in variables
        for component in (*variable.components, variable.storage.first)
    }.values()
    graph = tf.compat.v1.get_default_graph()
    # In a function, TensorFlow would order the assertion after the step's writes.
    in_function = graph.building_function
    inner = [graph.capture(handle) for handle in handles] if in_function else handles
    users = [op for handle in inner for op in handle.consumers() if op in ops]
    with tf.init_scope(), tf.device(None), tf.name_scope("initialized"):
        checks = [tf.raw_ops.VarIsInitializedOp(resource=handle) for handle in handles]
        check = tf.debugging.Assert(
            tf.reduce_all(checks),
            [
                f"a step gave new components to variables ({names}), which this "
                "session has not initialized.",
                f"at {errors.user_line()}",
                "Fix: build the step before the session runs the initializers, or run "
                'them in a new session; or use variables="mirrored".',
            ],
        )
    if in_function:
        with tf.init_scope(), tf.control_dependencies([check]):
            check = tf.constant(True)
        check = graph.capture(check).op
    for op in users:
        tf_ops.add_control_inputs(op, [check])
