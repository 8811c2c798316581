"""What a step assigns to a mirrored variable is made equal on all replicas first.

Called by ReplicatedVariable while a step is built, for every assignment that is not
known to be equal by construction.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.primitives import all_gather, all_reduce, broadcast


def agree(variable: Any, value: Any, replica: context.ReplicaContext) -> Any:
    """Returns what all replicas assign in place of their own values.

    Args:
        variable: The ReplicatedVariable that is assigned to.
        value: What this replica assigns, of the variable's shape.
        replica: The replica being built.

    Returns:
        `value` where components may differ or updates are equal anyway; else the
        aggregate that the variable asks for, the mean of floats, and anything else as
        it is, which is taken to be equal.

    Raises:
        ContextError: An optimizer that was not wrapped is updating the variable.
        ArgumentError: The variable asks for the mean of integers.
    """
    if variable.differs or replica.updating or replica.num_replicas == 1:
        return value
    refuse_unwrapped(variable)
    value = tf.convert_to_tensor(value, dtype=variable.dtype)
    how = variable.aggregation
    if how == tf.VariableAggregation.SUM:
        return _combined(value, "sum", variable.owner)
    if how == tf.VariableAggregation.ONLY_FIRST_REPLICA:
        return broadcast.broadcast(value, root=0)
    has_mean = variable.dtype.is_floating or variable.dtype.is_complex
    if how == tf.VariableAggregation.MEAN or has_mean:
        return _combined(value, "mean", variable.owner)
    return (
        _checked_equal(value, variable.name) if replica.build.options.check else value
    )


def _combined(value: tf.Tensor, op: str, owner: int | None) -> tf.Tensor:
    """Reduces a value over all replicas, for the replica that owns the variable."""
    if owner is None:
        return all_reduce.all_reduce(value, op)
    return all_reduce.combine([value], op, None, [owner])[0]


def refuse_unwrapped(variable: Any) -> None:
    """Raises if an optimizer that nobody wrapped is updating `variable` in a step."""
    optimizer = _tf.applying_optimizer()
    if optimizer is not None:
        raise errors.ContextError(
            errors.compose(
                f"the optimizer {optimizer} updates variable {variable.name} in a "
                "step, but does not combine the gradients of the replicas.",
                [f"at {errors.user_line()}"],
                "wrap it once, where you make it: "
                "optimizer = repl.wrap_optimizer(optimizer).",
            )
        )


def _checked_equal(value: tf.Tensor, name: str) -> tf.Tensor:
    """Returns `value`, after asserting that all replicas hand in the same one."""
    line = errors.user_line()
    everyone = all_gather.all_gather(value)
    with tf.control_dependencies(
        [
            tf.debugging.Assert(
                tf.reduce_all(tf.equal(everyone, value)),
                [
                    f"the replicas assign different values to variable {name} at "
                    f"{line}; give it an aggregation, or all_reduce the value:",
                    everyone,
                ],
            )
        ]
    ):
        return tf.identity(value)
