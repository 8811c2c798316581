# SPDX-License-Identifier: Apache-2.0
"""Prepares the results of step_fn for use outside the step.

Inside the step, a leaf becomes a tensor. On the way out it is tied to the rest of the
step: no gradient passes through it, and in a session it waits for the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.graph.matching import control_flow
from replicator.graph.passes import identities
from replicator.primitives import base


def as_output(leaf: Any, step_fn: Any) -> Any:
    """Converts a leaf of step_fn's result to a tensor; None and ops stay as they are.

    Raises:
        ReplicatorError: The leaf cannot be converted.
    """
    if leaf is None or isinstance(leaf, tf.Operation):
        return leaf
    try:
        if _is_composite(leaf):
            return tf.nest.map_structure(_tensor, leaf, expand_composites=True)
        return _tensor(leaf)
    except errors.ReplicatorError:
        raise  # from a variable that cannot be read here
    except base.UNCONVERTED as error:
        raise errors.ReplicatorError(
            f"step_fn returned {type(leaf).__name__} {errors.repr_of(leaf)}, which is "
            "not a tensor.",
            errors.sites_of("step_fn", step_fn),
            "return tensors, numbers, variables, operations, None, or a nest of them.",
        ) from error


def _is_composite(leaf: Any) -> bool:
    """Whether a leaf consists of tensors with values: ragged, sparse, structured."""
    parts = tf.nest.flatten(leaf, expand_composites=True)
    if isinstance(leaf, tf.Variable) or any(part is leaf for part in parts):
        return False
    return all(part.dtype not in (tf.resource, tf.variant) for part in parts)


def _tensor(value: Any) -> tf.Tensor:
    """Returns a tensor of this graph that stays in place when its op is replaced."""
    if isinstance(value, tf.Tensor) and not tf.is_symbolic_tensor(value):
        # An eager tensor from outside the step: only a function can capture it.
        if not tf.compat.v1.get_default_graph().building_function:
            value = value.numpy()
    return control_flow.identity_if_rewired(identities.seen_through(base.usable(value)))


def as_outputs(returned: Any, step_fn: Any) -> Any:
    """Converts the leaves of step_fn's result to tensors.

    Raises:
        ReplicatorError: The result is not a nest, or a leaf cannot be converted.
    """
    try:
        leaves = base.leaves_of(returned)
    except base.UNCONVERTED as error:
        raise errors.ReplicatorError(
            "step_fn returned a value that is not a nest of tensors: "
            f"{errors.summary(error)}.",
            errors.sites_of("step_fn", step_fn),
            "return tensors, or lists, tuples and dicts of them; the keys of a dict "
            "must be of one type that can be sorted.",
        ) from error
    tensors = [as_output(leaf, step_fn) for leaf in leaves]
    return tf.nest.pack_sequence_as(returned, tensors)


def ops_of(returned: Any) -> list[tf.Operation]:
    """Returns the ops that compute the leaves of results."""
    leaves = tf.nest.flatten(returned, expand_composites=True)
    return [
        leaf.op if tf.is_tensor(leaf) else leaf for leaf in leaves if leaf is not None
    ]


def seal(leaf: Any) -> Any:
    """Stops gradients taken outside the step: they are None.

    Outside a step a variable stands for component 0, so such a gradient would silently
    omit what the other replicas contribute. Inside the step, gradients are complete.
    """
    if leaf is None or isinstance(leaf, tf.Operation):
        return leaf

    def stopped(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(tensor.device):
            return tf.stop_gradient(tensor)

    return tf.nest.map_structure(stopped, leaf, expand_composites=True)


def returnable(leaves: Sequence[Any]) -> list[Any]:
    """Replaces ops by None: a traced function runs all its ops, but returns none."""
    return [None if isinstance(leaf, tf.Operation) else leaf for leaf in leaves]


def after(completion: tf.Operation | None, leaf: Any) -> Any:
    """Returns an output of a session's step that waits for the whole step.

    Args:
        completion: The op that runs after all effects of the step; None without any.
        leaf: The output. None, which cannot be fetched, becomes an op.
    """
    if leaf is None:
        return completion or tf.no_op()
    if completion is None:
        return leaf
    if isinstance(leaf, tf.Operation):
        return tf.group(leaf, completion)

    def waiting(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(tensor.device), tf.control_dependencies([completion]):
            return tf.identity(tensor)

    return tf.nest.map_structure(waiting, leaf, expand_composites=True)
