# SPDX-License-Identifier: Apache-2.0
"""Global batches that do not divide evenly, and one device to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests import helpers

SIZES = [6, 5, 2]  # on three replicas: evenly, unevenly, and one without examples
X = np.random.default_rng(1).normal(size=[6, 2])
W = np.array([[0.5, -0.3], [0.2, 0.7]])

Repl = replicator.Replicator | None  # None: one device
Fn = Callable[[Any, Any, Any], Any]  # takes a Repl, the variable and the batch


def unknown(size: int) -> tf.data.Dataset:
    """Returns batches of a size that is not known while a step is built."""
    return tf.data.Dataset.from_tensor_slices(X[:size]).batch(6)


def mean(repl: Repl, x: Any) -> Any:
    """Returns the mean of a value of all examples, from those of the replicas."""
    return x if repl is None else repl.all_reduce(x, "mean", repl.weight)


def contrasted(repl: Repl, hidden: Any) -> Any:
    """A mean whose gradients come from all replicas."""
    every = hidden if repl is None else repl.all_gather(hidden, axis=0)
    return tf.reduce_mean(tf.reduce_logsumexp(hidden @ tf.transpose(every), axis=1))


def gathered(repl: Repl, w: Any, x: Any) -> Any:
    return contrasted(repl, tf.tanh(x @ w))


def taken(loss_fn: Callable[[], Any], w: Any) -> Any:
    """Returns a loss' gradient for w, which may be no variable."""
    with tf.GradientTape() as tape:
        tape.watch(w)
        loss = loss_fn()
    return tape.gradient(loss, w)


def gradient_of(loss_fn: Fn) -> Fn:
    return lambda repl, w, x: taken(lambda: loss_fn(repl, w, x), w)


def one_device(fn: Fn, size: int, start: Any = W) -> np.ndarray:
    value = fn(None, tf.Variable(start), tf.constant(X[:size]))
    return tf.convert_to_tensor(value).numpy()


def results(fn: Fn, batch: Any) -> Any:
    """Returns those of fn on three replicas, each with a shard of the batch."""
    repl = helpers.make(3)
    with repl.context():
        w = tf.Variable(W)
    return repl.run(lambda x: fn(repl, w, x), batch, "global_batch")


def update(fn: Fn, batch: Any, optimizer: Any = None, **options: Any) -> np.ndarray:
    """Returns what a wrapped optimizer subtracts, whose gradient fn returns."""
    repl = helpers.make(3)
    with repl.context():
        w = tf.Variable(W)
        sgd = optimizer or tf.keras.optimizers.SGD(1.0)
        wrapped = repl.wrap_optimizer(sgd, **options)
    repl.run(
        lambda x: wrapped.apply_gradients([(fn(repl, w, x), w)]), batch, "global_batch"
    )
    return W - w.numpy()


def update_in_a_session(fn: Fn, size: int) -> np.ndarray:
    """The same, of a batch that is fed."""
    repl = helpers.make(3)
    sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    with tf.Graph().as_default(), helpers.session() as session:
        with repl.context():
            w = tf.Variable(W)
            wrapped = repl.wrap_optimizer(sgd)
        x = tf.compat.v1.placeholder(tf.float64, [None, 2])
        result = repl.run(
            lambda x: wrapped.apply_gradients([(fn(repl, w, x), w)]), x, "global_batch"
        )
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(result, {x: X[:size]})
        return W - session.run(w)
