"""broadcast: the root's value goes to every replica.

Meaning: every replica receives replica `root`'s tensor. Dual: the sum of all replicas'
gradients goes to the root, zeros to the others. Lowering: the root's tensor is read by
every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.graph.placeholder import Placeholder, Value
from replicator.graph.rewrite import Matched
from replicator.primitives import all_reduce, base


def broadcast(value: Any, root: int = 0) -> Any:
    """Gives every replica the root's value.

    Args:
        value: A nest of tensors of any dtype and shape, alike on all replicas.
        root: The replica whose value is sent, 0 <= root < num_replicas.

    Returns:
        A nest like `value` with the root's tensors, on this replica's device.

    Raises:
        ArgumentError: `root` names no replica, or a leaf is no dense tensor.
    """
    replica = context.require("broadcast")
    base.check_replica("broadcast", "root", root, replica.num_replicas)
    leaves = base.flatten(value, "broadcast")
    if any(isinstance(leaf, tf.IndexedSlices) for leaf in leaves):
        raise base.bad_argument(
            "broadcast",
            "cannot send IndexedSlices",
            "broadcast its values and indices.",
        )
    if not leaves:
        return value
    results = [Value.of(leaf) for leaf in leaves]
    received = base.communicate("broadcast", {"root": root}, leaves, results, gradient)
    return tf.nest.pack_sequence_as(value, received)


def gradient(
    placed: Placeholder, upstream: Sequence[tf.Tensor]
) -> Sequence[tf.Tensor | None]:
    """Sums the gradients to the root; the same ops are built on every replica.

    Replicas must build alike, the root too: otherwise second derivatives would
    communicate on some replicas only.
    """
    totals = all_reduce.sum_floating(upstream, of=placed.call)
    at_root = placed.call.replica_id == placed.call.options["root"]
    return [
        None if total is None else tf.where(at_root, total, tf.zeros_like(total))
        for total in totals
    ]


def lower(matched: Matched) -> Sequence[Sequence[tf.Tensor]]:
    """Hands the root's tensors to all replicas.

    Moves (replicas - 1) * bytes(value). Shapes unknown at build time are compared when
    the step runs.
    """
    root = matched.options["root"]
    sent = []
    for k in range(len(matched.operands[root])):
        column = matched.column(k)
        with tf.device(matched.devices[root]):
            sent.append(_checked(column[root], column))
    return [sent for _ in matched.operands]


def _checked(value: tf.Tensor, column: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns `value`, after comparing its shape with the others' where unknown."""
    if all(other.shape.is_fully_defined() for other in column):
        return tf.identity(value)  # compared when the calls were matched
    size = _rank_and_shape(value)
    alike = [
        tf.debugging.assert_equal(
            _rank_and_shape(other),
            size,
            message="broadcast: a replica's tensor differs in shape from the root's",
        )
        for other in column
        if other is not value
    ]
    with tf.control_dependencies([op for op in alike if op is not None]):
        return tf.identity(value)


def _rank_and_shape(tensor: tf.Tensor) -> tf.Tensor:
    """Returns [rank, *shape]: shapes alone compare as equal where they broadcast."""
    return tf.concat([[tf.rank(tensor)], tf.shape(tensor)], 0)
