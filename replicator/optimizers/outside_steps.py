# SPDX-License-Identifier: Apache-2.0
"""Accumulates gradients of whole batches outside steps.

Used when a model that trains on replicas runs on one device for a while, to be
inspected; the sums are the ones that its steps add to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator.optimizers import accumulators, gradients, sparsity
from replicator.optimizers.accumulators import Gradient
from replicator.optimizers.sparsity import GradientLayout
from replicator.primitives import sparse


def apply(
    combiner: gradients.Combiner,
    grads: Sequence[Gradient | None],
    variables: Sequence[Any],
    prepare: Callable[[Sequence[Any]], Any],
    update: Callable[[Sequence[Any]], Any],
) -> Any:
    """Sums gradients of whole batches outside steps, and updates at each k-th batch.

    They are added to the sums of weighted steps, where a whole batch weighs 1.

    Args:
        combiner: Holds the optimizer's sums.
        grads: The gradients, one per variable, or None.
        variables: The variables that they are gradients of.
        prepare: As for `Combiner.apply`.
        update: Updates the variables by gradients.
    """
    used = [k for k, gradient in enumerate(grads) if gradient is not None]
    if not used:
        return tf.no_op()
    used_grads = [grads[k] for k in used]
    with tf.init_scope():
        prepare([variables[k] for k in used])
    addends = [accumulators.wide(gradient) for gradient in used_grads]
    addends.append(tf.constant(1.0, accumulators.dtype_of_weights(addends)))
    key = (
        None,
        True,
        tuple(
            (sparsity.key_of(variables[k]), GradientLayout.of(grads[k])) for k in used
        ),
    )
    if key not in combiner.accumulators:
        combiner.accumulators[key] = combiner.sums.create(addends, "sum", combiner.name)
    sums, counter = combiner.accumulators[key]
    step = counter.add(tf.constant(1, tf.int64))
    *totals, weight = [s.add(g) for s, g in zip(sums, addends, strict=True)]

    def apply_and_clear() -> tf.Tensor:
        means: list[Gradient | None] = [None] * len(grads)
        for k, total, gradient in zip(used, totals, used_grads, strict=True):
            if isinstance(total, tf.IndexedSlices):
                total = sparse.add_up(total)
            mean = accumulators.scaled(total, accumulators.reciprocal(weight))
            means[k] = accumulators.cast(mean, gradient.dtype)
        update(means)
        for accumulator in (*sums, counter):
            accumulator.clear()
        return tf.constant(True)

    full = step >= combiner.accumulation_steps
    return tf.cond(full, apply_and_clear, lambda: tf.constant(False))
