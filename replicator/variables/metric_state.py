# SPDX-License-Identifier: Apache-2.0
"""What metrics of Keras write and return in a step of one's own.

Each replica updates its own component of a metric's variables, which are read as their
sum. That is the metric over all examples if its updates add, and if what they add
belongs to examples; else it is refused, or warned of. A result is computed from the
sums, in a step as outside of it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import callers
from replicator.variables import additions, agreement, doubts


def check_write(
    variable: Any, value: Any, replica: context.ReplicaContext, method: str
) -> None:
    """Raises UnsupportedError if an update of a metric does not keep a sum.

    Args:
        variable: The ReplicatedVariable, whose components may differ.
        value: What the replica writes.
        replica: The replica being built.
        method: The method that writes it.
    """
    if method != "assign" or not _adds_up(variable, replica):
        return
    update = callers.metric_call("update_state")
    if update is None or additions.keeps_sums(variable, value):
        return
    kind = type(update.metric).__name__
    raise errors.UnsupportedError(
        f"the metric {kind} assigns a value to {variable.name} on replica "
        f"{replica.replica_id} that does not add to the value before. Each replica "
        "updates a value of its own, and the metric's is their sum.",
        fix="update it by assign_add; or with the same values on all replicas, e.g. "
        'repl.all_reduce(value, "max") or repl.all_gather(values, axis=0), and '
        'create it with add_variable(..., aggregation="only_first_replica"), in '
        "tf_keras with add_weight(..., "
        "aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA).",
    )


def doubt_share(variable: Any, written: Any, replica: context.ReplicaContext) -> None:
    """Has the user warned of a mean that weighs shards of different sizes equally.

    Args:
        variable: The ReplicatedVariable, whose components may differ.
        written: What the replica writes.
        replica: The replica being built.
    """
    if replica.examples is None or not _adds_up(variable, replica):
        return
    update = callers.metric_call("update_state")
    if (
        update is None
        or not callers.is_mean(update.metric)
        or not tf.is_tensor(written)
    ):
        return
    values = update.arguments.get("values")
    if values is None or update.arguments.get("sample_weight") is not None:
        return
    values = tf.convert_to_tensor(values)
    if values.shape.rank != 0:
        return
    warning = errors.compose(
        f"the metric {update.metric.name} ({type(update.metric).__name__}) is given "
        "one number for all examples of a replica, and weights replicas equally, "
        "though their shards of a batch may hold different numbers of examples.",
        [f"at {errors.user_line()}"],
        "pass sample_weight=repl.weight, if the number is a mean over the examples; or "
        "pass one value per example.",
    )
    if values.graph is not tf.compat.v1.get_default_graph():
        values = tf.identity(values)
    doubt = doubts.Doubt(written, values, update.metric, warning)
    doubts.note(replica, doubt)


def is_for_result(variable: Any, replica: context.ReplicaContext | None) -> bool:
    """Whether a read in a step is one of a metric's result, of all replicas' examples.

    Metrics of tf.compat.v1 compute it in a merge_call, as libraries would do that are
    written for tf.distribute.

    Args:
        variable: The ReplicatedVariable that is read.
        replica: The replica being built, if any.
    """
    if replica is None or not variable.placement.is_aggregated:
        return False
    if variable.placement.grows or replica.num_replicas == 1:
        return False
    return replica.mode.merging or callers.metric_call("result") is not None


def aggregate(variable: Any, value: tf.Tensor) -> tf.Tensor:
    """Returns the aggregate of all components, for a result.

    Args:
        variable: The ReplicatedVariable.
        value: The value of this replica's component.
    """
    how = "sum" if variable.placement.adds_up else "mean"
    return agreement.combined(value, how, variable)


def _adds_up(variable: Any, replica: context.ReplicaContext) -> bool:
    return variable.placement.adds_up and replica.num_replicas > 1
