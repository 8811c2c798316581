# SPDX-License-Identifier: Apache-2.0
"""Copies variables for copy.deepcopy: target networks, twins, snapshots.

A copy is a variable of the same Replicator, inside its context and outside of it, with
the value and the placement of the original: an optimizer's slots that are copied with
their variable stay with it. Like tf.Variable, it can be copied eagerly only.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context, errors


def copied(variable: Any) -> Any:
    """Returns a new variable with a variable's value.

    Args:
        variable: A ReplicatedVariable or a PartitionedVariable.

    Raises:
        ContextError: In a step, or in a graph.
    """
    if context.current() is not None or not tf.executing_eagerly():
        raise errors.ContextError(
            f"variable {variable.name} is copied in a step, a tf.function or a "
            "tf.Graph: the copy would be a new variable each time.",
            fix="copy it before, while TensorFlow executes eagerly.",
        )
    description = variable.description
    differs = variable.placement.differs
    new = variable.creator(
        None,
        # What replicas have of their own is copied below; a read would combine it.
        initial_value=(
            variable.storage.first.read_value() if differs else variable.read_on_host()
        ),
        name=variable._shared_name,
        dtype=variable.dtype,
        shape=variable.shape,
        trainable=variable.trainable,
        constraint=variable.constraint,
        synchronization=variable.synchronization,
        aggregation=variable.aggregation,
        # A strategy that has yet to decide on the variable decides on the copy, too.
        description=None if description.undecided else description,
    )
    if differs:
        for to, of in zip(new.components, variable.components, strict=True):
            to.assign(of.read_value())
    return new
