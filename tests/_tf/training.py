# SPDX-License-Identifier: Apache-2.0
"""Trains a small model in all ways; fast code may be on or off.

`python -m tests._tf.training` prints the results as JSON.
"""

from __future__ import annotations

import json

import tensorflow as tf

import replicator
from replicator._tf import choice
from tests import helpers

_STEPS = 4


def train_in_all_ways() -> dict[str, list[float]]:
    """Returns the last losses and the trained weights, by the way of training."""
    results = {}
    for variables in ("mirrored", "sharded"):
        for mode in helpers.MODES:
            results[f"{variables} {mode}"] = _train(variables, mode)
        for mode in ("eager", "function"):
            results[f"{variables} {mode} together"] = _train(variables, mode, True)
    return results


def _train(variables: str, mode: str, together: bool = False) -> list[float]:
    repl = helpers.make(2, variables=variables)

    def make_step():
        weights = tf.Variable([[0.5, -0.5], [0.25, 1.0], [0.125, 0.0]])
        bias = tf.Variable([0.1, 0.2])
        turns = tf.Variable(0, trainable=False)
        optimizer = repl.wrap_optimizer(tf.compat.v1.train.MomentumOptimizer(0.1, 0.9))

        def step_fn(x):
            turns.assign_add(1)
            with tf.GradientTape() as tape:
                y = tf.tanh(x @ weights + bias)
                loss = tf.reduce_mean((y - 1.0) ** 2)
                loss = tf.cond(
                    tf.equal(turns % 2, 0),
                    lambda: repl.all_reduce(loss, "mean"),
                    lambda: loss,
                )
            gradients = tape.gradient(loss, [weights, bias])
            optimizer.apply_gradients(zip(gradients, [weights, bias], strict=True))
            return loss, weights.read_value(), bias.read_value()

        return step_fn

    def input_fn(info):
        rows = tf.range(3.0 * 2 * _STEPS * 2)
        data = tf.data.Dataset.from_tensor_slices(tf.reshape(tf.sin(rows), [-1, 3]))
        return helpers.untuned(data.batch(2))

    token = helpers.STEPS_TOGETHER.set(together)
    try:
        result = helpers.run(mode, repl, make_step, input_fn, _STEPS)
    finally:
        helpers.STEPS_TOGETHER.reset(token)
    leaves = tf.nest.flatten([list(per_replica) for per_replica in result])
    return [float(value) for leaf in leaves for value in tf.reshape(leaf, [-1])]


if __name__ == "__main__":
    replicator.Replicator(["CPU:0", "CPU:1"])  # splits the CPU
    told = {"fast": sorted(choice.FAST), "trained": train_in_all_ways()}
    print(json.dumps(told))
