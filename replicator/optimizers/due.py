# SPDX-License-Identifier: Apache-2.0
"""Reduces gradients only in the steps in which a sum over steps is complete."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from replicator import context
from replicator.graph.ir.placeholder import OperandPolicy
from replicator.optimizers.accumulators import Gradient
from replicator.primitives import all_gather, all_reduce, sparse


def all_reduce_when(
    full: tf.Tensor,
    totals: Sequence[Gradient],
    op: str,
    policies: Sequence[OperandPolicy],
) -> list[Gradient]:
    """Reduces if `full` is true; else moves no data and returns zeros or no rows."""
    dense = [t for t in totals if not isinstance(t, tf.IndexedSlices)]
    dense_policies = [
        policy
        for t, policy in zip(totals, policies, strict=True)
        if not isinstance(t, tf.IndexedSlices)
    ]
    reduced = iter(
        all_reduce.reduce_dense(dense, op, when=full, policies=dense_policies)
        if dense
        else []
    )
    results: list[Gradient] = []
    for total, policy in zip(totals, policies, strict=True):
        if not isinstance(total, tf.IndexedSlices):
            results.append(next(reduced))
            continue
        num_rows = tf.where(full, tf.shape(total.values)[0], 0)
        parts = [total.values[:num_rows], total.indices[:num_rows]]
        values, indices = all_gather.all_gather(parts, axis=0)
        gathered = tf.IndexedSlices(values, indices, total.dense_shape)
        group = context.require("all_gather").build.world.replica_ids
        count = len(group) if op == "mean" else 1
        results.append(sparse.add_up(gathered, count, group, policy))
    return results
