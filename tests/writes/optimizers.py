# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose random writes differ between replicas."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf


class NoisySGD(keras.optimizers.SGD):
    """Adds noise to each update."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        noise = tf.random.normal(variable.shape, dtype=variable.dtype)
        self.assign_sub(variable, (gradient + noise) * learning_rate)


class NoisySonnet(tf.Module):
    """Like Sonnet's optimizers, with noise."""

    def apply(self, updates: Any, parameters: Any) -> None:
        for update, parameter in zip(updates, parameters, strict=True):
            parameter.assign_sub(0.125 * (update + tf.random.normal(update.shape)))


class NoisyV1(tf.compat.v1.train.GradientDescentOptimizer):
    """Adds noise to each gradient, and writes by its own op."""

    def _resource_apply_dense(self, grad: Any, handle: Any) -> Any:
        return super()._resource_apply_dense(grad + tf.random.normal([3]), handle)


def noisy_rate() -> Any:
    """Returns a rate that is drawn separately on each replica."""
    return tf.random.uniform([])
