# SPDX-License-Identifier: Apache-2.0
"""Makes values that a step assigns to a mirrored variable equal on all replicas.

ReplicatedVariable calls it while a step is built, for every assignment that is not
known to be equal by construction.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import arguments, context, errors
from replicator._tf import callers, frames
from replicator.graph.order import effects
from replicator.primitives import all_gather, all_reduce, broadcast, reductions
from replicator.variables import doubts

# Keys, each with a variable's, of what a build may know:
UNEVEN = "written unevenly by an optimizer"
DOUBTED = "assigned values that may differ and have no mean"
# What TensorFlow compares in place of quantized numbers.
_BITS = {tf.qint8: tf.int8, tf.quint8: tf.uint8, tf.qint32: tf.int32}


def is_equal(variable: Any, replica: context.ReplicaContext) -> bool:
    """Whether a write needs no agreement: components may differ, or updates are equal.

    Args:
        variable: The ReplicatedVariable that is written.
        replica: The replica being built.
    """
    if variable.placement.differs or replica.num_replicas == 1:
        return True
    return replica.mode.updating and not _is_uneven(variable, replica)


def _is_uneven(variable: Any, replica: context.ReplicaContext) -> bool:
    """Whether an optimizer was found to write values that differ between replicas."""
    return (UNEVEN, variable.key) in replica.build.knowledge


def is_compared(variable: Any, build: context.Build) -> bool:
    """Whether values without a mean are compared in each step, not assumed equal."""
    return build.options.check or (DOUBTED, variable.key) in build.knowledge


def is_taken_as_equal(variable: Any) -> bool:
    """Whether assigned values are never combined: integers, booleans and strings."""
    has_mean = variable.dtype.is_floating or variable.dtype.is_complex
    return not has_mean and variable.aggregation == tf.VariableAggregation.NONE


def agree(
    variable: Any, value: Any, replica: context.ReplicaContext, method: str = "assign"
) -> Any:
    """Returns what all replicas assign in place of their own values.

    Args:
        variable: The ReplicatedVariable that is assigned to.
        value: What this replica assigns, of the variable's shape.
        replica: The replica being built.
        method: The method that assigns it.

    Returns:
        `value` where components may differ or updates are equal anyway. Otherwise the
        aggregate that the variable asks for, or the mean of floats; any other value
        unchanged, and compared in each step if it may differ (see `drift`).

    Raises:
        ArgumentError: The variable asks for the mean of integers.
    """
    if is_equal(variable, replica):
        return value
    value = tf.convert_to_tensor(arguments.native(value), dtype=variable.dtype)
    how = variable.aggregation
    if _is_uneven(variable, replica) and how == tf.VariableAggregation.SUM:
        how = tf.VariableAggregation.MEAN  # each replica writes the whole update
    with replica.agreeing_on(variable.name, method, variable.key):
        if how == tf.VariableAggregation.SUM:
            return combined(value, "sum", variable)
        if how == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            return broadcast.broadcast(value, root=0)
        has_mean = variable.dtype.is_floating or variable.dtype.is_complex
        if how == tf.VariableAggregation.NONE and variable.shape.rank:
            _refuse_row_states(variable)
        elif how == tf.VariableAggregation.NONE and method == "assign_add":
            _doubt_count(variable, value, replica)
        if how == tf.VariableAggregation.MEAN or has_mean:
            # A batch without examples may give NaN statistics; they get no weight.
            mean = combined(value, "mean", variable, replica.examples)
            if how == tf.VariableAggregation.NONE:
                _doubt_mean(variable, mean, value, replica)
            return mean
        if is_compared(variable, replica.build):
            return _checked_equal(value, variable.name)
        return value


def _doubt_mean(
    variable: Any, mean: tf.Tensor, own: tf.Tensor, replica: context.ReplicaContext
) -> None:
    """Has the user warned of a mean that nobody asked for, if replicas differ.

    Layers of libraries keep moving averages of statistics, whose mean is right.

    Args:
        variable: The ReplicatedVariable that is written.
        mean: The mean, which is written.
        own: The replica's own value.
        replica: The replica being built.
    """
    if frames.written_by_library():
        return
    warning = errors.compose(
        f"variable {variable.name} has no aggregation, and the replicas assign "
        "different values to it: their mean is assigned. That is not the sum or the "
        "maximum that one device computes from all examples.",
        [f"at {errors.user_line()}"],
        'assign what is equal on all replicas, e.g. repl.all_reduce(value, "sum") or '
        '"max" in place of the value; or say what is meant, '
        "tf.Variable(..., aggregation=tf.VariableAggregation.MEAN), which ends this "
        "warning, or SUM. A function that is written for whole batches runs unchanged "
        "by AutoDist.function.",
    )
    doubts.note(replica, doubts.Doubt(mean, own, variable.storage, warning))


def _doubt_count(
    variable: Any, value: tf.Tensor, replica: context.ReplicaContext
) -> None:
    """Warns of a constant like `x.shape[0]` that may stand for the whole batch.

    It is a Python number, of which nothing tells that it is the size of a shard: equal
    shards give equal numbers. One example for each replica looks like a count of steps.

    Args:
        variable: The scalar that the value is added to.
        value: The replica's own value.
        replica: The replica being built.
    """
    if replica.shard is None or frames.written_by_library():
        return
    rows = tf.get_static_value(replica.shard.count)
    if rows is None or rows < 2 or tf.get_static_value(value) != rows:
        return
    warning = errors.compose(
        f"each replica adds {rows} to variable {variable.name}, once for all of them; "
        f"{rows} is also the number of examples in each one's part of the batch. A "
        "count of the examples would be that of one replica only.",
        [f"at {errors.user_line()}"],
        'to count all examples, add repl.all_reduce(x.shape[0], "sum"); if the number '
        "means something else, say so, which ends this warning: tf.Variable(..., "
        "aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA).",
    )
    doubts.warn(variable.storage, warning)


def _refuse_row_states(variable: Any) -> None:
    """Raises UnsupportedError if a stateful RNN writes its state, a row per example.

    The rows of different replicas are those of different examples: a mean is wrong.
    """
    layer = callers.stateful_layer(variable)
    if layer is None:
        return
    raise errors.UnsupportedError(
        f"the layer {layer.name} ({type(layer).__name__}) is stateful: it keeps state "
        f"for each row of a batch, in {variable.name}, but the rows of each replica "
        "are those of other examples.",
        fix="create it with stateful=False and return_state=True, and keep the states "
        "in variables with synchronization=tf.VariableSynchronization.ON_READ, passed "
        "as initial_state; or run it on one device.",
    )


def of_examples(
    variable: Any, value: Any, replica: context.ReplicaContext, method: str
) -> Any:
    """Returns what a replica writes to its component; without examples, no change.

    The mean over a shard without examples is NaN and would stay in a metric; nor may
    such a shard add to the metric's count.

    Args:
        variable: The ReplicatedVariable, whose components may differ.
        value: What this replica writes.
        replica: The replica being built.
        method: The method that writes it.
    """
    inexact = variable.dtype.is_floating or variable.dtype.is_complex
    if replica.examples is None or replica.mode.updating or not inexact:
        return value
    if variable.placement.grows:  # rows of gradients, which already have no weight
        return value
    value = tf.convert_to_tensor(value, dtype=variable.dtype)
    spoilt = ~tf.math.is_finite(tf.abs(value)) | _is_of_nothing(_given())
    is_skipped = tf.equal(replica.examples, 0) & spoilt
    unchanged = variable.read_value() if method == "assign" else tf.zeros_like(value)
    return tf.where(is_skipped, unchanged, value)


def _given() -> list[Any] | None:
    """Returns the arguments of the running update of a Keras metric, if any."""
    update = callers.metric_call("update_state")
    return None if update is None else list(update.arguments.values())


def _is_of_nothing(given: Any) -> tf.Tensor:
    """Whether a metric was given NaN or infinity, or nothing along the first axis.

    Args:
        given: The arguments of the metric's update; None if no metric is writing.
    """
    leaves = tf.nest.flatten(given, expand_composites=True)
    tensors = [tf.convert_to_tensor(leaf) for leaf in leaves if tf.is_tensor(leaf)]
    checks = [
        tf.reduce_any(~tf.math.is_finite(tf.abs(tensor)))
        for tensor in tensors
        if tensor.dtype.is_floating or tensor.dtype.is_complex
    ]
    empty = [tf.equal(tf.size(t), 0) for t in tensors if t.shape.rank != 0]
    if empty:
        checks.append(tf.reduce_all(empty))
    return tf.reduce_any(checks) if checks else tf.constant(False)


def combined(value: tf.Tensor, op: str, variable: Any, weight: Any = None) -> Any:
    """Reduces a value over all replicas, under the variable's operand policy.

    Args:
        value: This replica's value.
        op: "sum" or "mean".
        variable: The ReplicatedVariable.
        weight: The replica's weight in the mean, or None.
    """
    reductions.check("all_reduce", value, op)
    policies = [variable.policy]
    return all_reduce.combine([value], op, weight, policies, joinable=True)[0]


def claim(variable: Any, replica: context.ReplicaContext) -> effects.Claim | None:
    """Returns the claim of an unwrapped optimizer to write equally, yet to be proven.

    Such an optimizer is right where its gradients are equal on all replicas: its writes
    are then as equal as they are, and must not be aggregated.

    Args:
        variable: The ReplicatedVariable that is written.
        replica: The replica being built.

    Returns:
        None if nothing is to be proven: the replicas agree on writes, or may differ.
    """
    if variable.placement.differs or replica.num_replicas == 1 or replica.mode.updating:
        return None
    optimizer = callers.applying_optimizer()
    if optimizer is None:
        return None
    return effects.Claim(type(optimizer).__name__, wrapped=False)


def _checked_equal(value: tf.Tensor, name: str) -> tf.Tensor:
    """Returns `value` after asserting that all replicas pass the same one."""
    line = errors.user_line()
    bits = _BITS.get(value.dtype)
    comparable = value if bits is None else tf.bitcast(value, bits)
    everyone = all_gather.all_gather(comparable)
    with tf.control_dependencies(
        [
            tf.debugging.Assert(
                tf.reduce_all(tf.equal(everyone, comparable)),
                [
                    f"the replicas assign different values to variable {name}.",
                    f"at {line}",
                    "values of all replicas:",
                    everyone,
                    "Fix: give it an aggregation, or all_reduce the value.",
                ],
            )
        ]
    ):
        return tf.identity(value)
