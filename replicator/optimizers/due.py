# SPDX-License-Identifier: Apache-2.0
"""Gradients that are reduced in some steps only: where a sum over steps is full."""

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
    """Reduces where `full` is true; else moves nothing, returns zeros or no rows."""
    dense = [t for t in totals if not isinstance(t, tf.IndexedSlices)]
    own = [
        policy
        for t, policy in zip(totals, policies, strict=True)
        if not isinstance(t, tf.IndexedSlices)
    ]
    reduced = iter(
        all_reduce.reduce_dense(dense, op, when=full, policies=own) if dense else []
    )
    results: list[Gradient] = []
    for total in totals:
        if not isinstance(total, tf.IndexedSlices):
            results.append(next(reduced))
            continue
        due = tf.where(full, tf.shape(total.values)[0], 0)
        parts = [total.values[:due], total.indices[:due]]
        values, indices = all_gather.all_gather(parts, axis=0)
        gathered = tf.IndexedSlices(values, indices, total.dense_shape)
        replicas = context.require("all_gather").num_replicas
        count = replicas if op == "mean" else 1
        results.append(sparse.add_up(gathered, count))
    return results
