# SPDX-License-Identifier: Apache-2.0
"""Sparse variational Gaussian processes of gpflow, trained by minibatches."""

from __future__ import annotations

import gpflow
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.clients.training import Training, check, ways

RNG = np.random.default_rng(1)
X = RNG.uniform(-1, 1, [12, 2])
Y = np.sin(3 * X[:, :1])
CLASSES = (Y > 0).astype(np.float64)


def _svgp(likelihood, y: np.ndarray, optimizer) -> Training:
    model = gpflow.models.SVGP(
        gpflow.kernels.Matern32(lengthscales=[1.0, 0.5]) + gpflow.kernels.Linear(),
        likelihood,
        inducing_variable=X[::3].copy(),
        num_data=len(X),
    )
    gpflow.set_trainable(model.inducing_variable, False)
    return Training(
        lambda x, y: model.training_loss((x, y)),
        lambda: model.trainable_variables,
        optimizer,
        (X, y),
    )


def regression() -> Training:
    return _svgp(gpflow.likelihoods.Gaussian(0.1), Y, keras.optimizers.Adam(0.05))


def classification() -> Training:
    optimizer = tf.compat.v1.train.AdamOptimizer(0.05)
    return _svgp(gpflow.likelihoods.Bernoulli(), CLASSES, optimizer)


@ways
@pytest.mark.parametrize("program", [regression, classification])
def test_equals_one_device(program, replicas, options):
    check(program, replicas, options, 1e-6)
