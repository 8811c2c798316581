"""Every primitive, with what plain TensorFlow computes from all replicas' tensors.

A new primitive is one entry here: the tests of this folder then run on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests import helpers

Tensors = Sequence[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One primitive with one set of options.

    Attributes:
        call: What a replica does with its tensor.
        plain: All replicas' results from all replicas' tensors, in plain TensorFlow.
        sizes: The first dimension of replica r's tensor; 2 everywhere, unless given.
        may_differ: Whether replicas may hold different shapes.
    """

    call: Callable[[replicator.Replicator, tf.Tensor], tf.Tensor]
    plain: Callable[[Tensors], Tensors]
    sizes: Callable[[int], int] = lambda r: 2
    may_differ: bool = False

    def inputs(self, num_replicas: int, seed: int = 0) -> list[np.ndarray]:
        """Returns one float64 tensor per replica, of shape [sizes(r), 3]."""
        rng = np.random.RandomState(seed)
        return [rng.randn(self.sizes(r), 3) for r in range(num_replicas)]


def _weight(r: int) -> float:
    return [3.0, 0.0, 1.0, 2.5][r % 4]


def _same(reduce: Callable[[Tensors], tf.Tensor]) -> Callable[[Tensors], Tensors]:
    """Every replica receives the same tensor."""

    def plain(xs: Tensors) -> Tensors:
        return [reduce(xs)] * len(xs)

    return plain


def _product(xs: Tensors) -> tf.Tensor:
    # Multiplied out: the second derivative of tf.reduce_prod is wrong at zeros.
    result = xs[0]
    for x in xs[1:]:
        result = result * x
    return result


def _weighted(xs: Tensors) -> tf.Tensor:
    weights = [_weight(r) for r in range(len(xs))]
    return tf.add_n([w * x for w, x in zip(weights, xs, strict=True)]) / sum(weights)


def _reduce(op: str) -> Callable[[replicator.Replicator, tf.Tensor], tf.Tensor]:
    return lambda repl, x: repl.all_reduce(x, op)


def _gather(axis: int | None) -> Callable[[replicator.Replicator, tf.Tensor], Any]:
    return lambda repl, x: repl.all_gather(x, axis)


CASES = {
    "sum": Case(_reduce("sum"), _same(tf.add_n)),
    "mean": Case(_reduce("mean"), _same(lambda xs: tf.add_n(xs) / len(xs))),
    "min": Case(_reduce("min"), _same(lambda xs: tf.reduce_min(tf.stack(xs), 0))),
    "max": Case(_reduce("max"), _same(lambda xs: tf.reduce_max(tf.stack(xs), 0))),
    "prod": Case(_reduce("prod"), _same(_product)),
    "weighted": Case(
        lambda repl, x: repl.all_reduce(
            x, "mean", weight=helpers.opaque(_weight(repl.replica_id))
        ),
        _same(_weighted),
    ),
    "broadcast": Case(lambda repl, x: repl.broadcast(x), _same(lambda xs: xs[0])),
    "broadcast_last": Case(
        lambda repl, x: repl.broadcast(x, repl.num_replicas - 1),
        _same(lambda xs: xs[-1]),
    ),
    "stack": Case(_gather(None), _same(tf.stack)),
    "concat": Case(
        _gather(0),
        _same(lambda xs: tf.concat(xs, 0)),
        sizes=lambda r: [2, 0, 3, 1][r % 4],
        may_differ=True,
    ),
    "concat_last": Case(_gather(-1), _same(lambda xs: tf.concat(xs, -1))),
}
