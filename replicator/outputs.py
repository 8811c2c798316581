"""What step_fn returned, made fit to leave the step.

Inside the step, a leaf becomes a tensor. On the way out it is tied to the rest of the
step: no gradient passes it, and in a session it waits for the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.graph import control_flow


def as_output(leaf: Any) -> Any:
    """Makes a leaf of what step_fn returned a tensor; None and ops stay.

    Raises:
        ReplicatorError: It cannot be made a tensor.
    """
    if leaf is None or isinstance(leaf, tf.Operation):
        return leaf
    if isinstance(leaf, tf.IndexedSlices | tf.SparseTensor | tf.RaggedTensor):
        return tf.nest.map_structure(control_flow.held, leaf, expand_composites=True)
    try:
        return control_flow.held(tf.convert_to_tensor(leaf))
    except (TypeError, ValueError) as error:
        raise errors.ReplicatorError(
            errors.compose(
                f"step_fn returned {type(leaf).__name__} {leaf!r}, which is no tensor.",
                fix="return tensors, numbers, variables, operations, None, or a nest "
                "of them.",
            )
        ) from error


def seal(leaf: Any) -> Any:
    """Stops gradients that are taken around the step: they are None.

    Outside a step a variable stands for component 0, so such a gradient would silently
    leave out what the other replicas did. Inside the step, gradients are whole.
    """
    if leaf is None or isinstance(leaf, tf.Operation):
        return leaf

    def stopped(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(tensor.device):
            return tf.stop_gradient(tensor)

    return tf.nest.map_structure(stopped, leaf, expand_composites=True)


def returnable(leaves: Sequence[Any]) -> list[Any]:
    """A traced function runs all of its ops, and cannot return them."""
    return [None if isinstance(leaf, tf.Operation) else leaf for leaf in leaves]


def after(done: tf.Operation | None, leaf: Any) -> Any:
    """Returns an output of a session's step that is there when the whole step is done.

    Args:
        done: Runs when all effects of the step have happened; None if there are none.
        leaf: The output. None, which cannot be fetched, becomes an op.
    """
    if leaf is None:
        return done or tf.no_op()
    if done is None:
        return leaf
    if isinstance(leaf, tf.Operation):
        return tf.group(leaf, done)

    def waiting(tensor: tf.Tensor) -> tf.Tensor:
        with tf.device(tensor.device), tf.control_dependencies([done]):
            return tf.identity(tensor)

    return tf.nest.map_structure(waiting, leaf, expand_composites=True)
