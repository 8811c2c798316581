# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over several batches that run as a whole, outside of steps.

Used where a model that trains on replicas runs on one device for a while, to be looked
at; the sums are those that its steps add to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator.optimizers import accumulators, gradients, sparsity
from replicator.optimizers.accumulators import Gradient
from replicator.optimizers.sparsity import Layout
from replicator.primitives import sparse


def apply(
    combiner: gradients.Combiner,
    grads: Sequence[Gradient | None],
    variables: Sequence[Any],
    prepare: Callable[[Sequence[Any]], Any],
    update: Callable[[Sequence[Any]], Any],
) -> Any:
    """Adds up gradients of whole batches, outside of steps; applies each k-th.

    In the sums that weighted steps add to, where a batch weighs 1 in all.

    Args:
        combiner: Keeps the sums of the optimizer.
        grads: The gradients.
        variables: What they are gradients of.
        prepare: As for its `apply`.
        update: Updates by gradients.
    """
    used = [k for k, gradient in enumerate(grads) if gradient is not None]
    if not used:
        return tf.no_op()
    own = [grads[k] for k in used]
    with tf.init_scope():
        prepare([variables[k] for k in used])
    one = tf.constant(1.0)
    addends = [*(accumulators.wide(gradient) for gradient in own), one]
    key = (
        None,
        True,
        tuple((sparsity.key_of(variables[k]), Layout.of(grads[k])) for k in used),
    )
    if key not in combiner.accumulators:
        combiner.accumulators[key] = combiner.sums.create(addends, "sum", combiner.name)
    sums, counter = combiner.accumulators[key]
    turn = counter.add(tf.constant(1, tf.int64))
    *totals, weight = [s.add(g) for s, g in zip(sums, addends, strict=True)]

    def apply_and_clear() -> tf.Tensor:
        everyone: list[Gradient | None] = [None] * len(grads)
        for k, total, gradient in zip(used, totals, own, strict=True):
            if isinstance(total, tf.IndexedSlices):
                total = sparse.add_up(total)
            mean = accumulators.scaled(total, tf.math.divide_no_nan(1.0, weight))
            everyone[k] = accumulators.cast(mean, gradient.dtype)
        update(everyone)
        for accumulator in (*sums, counter):
            accumulator.clear()
        return tf.constant(True)

    full = turn >= combiner.accumulation_steps
    return tf.cond(full, apply_and_clear, lambda: tf.constant(False))
