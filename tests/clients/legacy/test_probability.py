# SPDX-License-Identifier: Apache-2.0
"""Distributions, bijectors and layers of TensorFlow Probability."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
import tf_keras

from tests.clients.training import Training, check, ways

tfb, tfd = tfp.bijectors, tfp.distributions
RNG = np.random.default_rng(1)
X = RNG.normal(size=[12, 2]).astype(np.float32)
Y = X @ np.float32([[1.0], [2.0]])


def mixture() -> Training:
    """Fitted by its log-likelihood; scales and weights are transformed variables."""
    weights = tf.Variable([0.1, 0.2, 0.3])
    means = tf.Variable([[-1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    scales = tfp.util.TransformedVariable(tf.ones([3, 2]), tfb.Softplus())
    model = tfd.MixtureSameFamily(
        tfd.Categorical(logits=weights), tfd.MultivariateNormalDiag(means, scales)
    )
    return Training(
        lambda x: -tf.reduce_mean(model.log_prob(x)),
        lambda: model.trainable_variables,
        tf_keras.optimizers.Adam(0.05),
        (X,),
    )


def flow() -> Training:
    """A masked autoregressive flow."""
    tf_keras.utils.set_random_seed(1)
    network = tfb.AutoregressiveNetwork(
        params=2, hidden_units=[8], activation="tanh", event_shape=[2]
    )
    model = tfd.TransformedDistribution(
        tfd.Sample(tfd.Normal(0.0, 1.0), [2]), tfb.MaskedAutoregressiveFlow(network)
    )
    network(tf.constant(X))  # not by the bijector, which caches results by ids
    return Training(
        lambda x: -tf.reduce_mean(model.log_prob(x)),
        lambda: network.trainable_variables,
        tf_keras.optimizers.Adam(0.05),
        (X,),
    )


def regression() -> Training:
    """A model whose output is a distribution."""
    tf_keras.utils.set_random_seed(1)
    model = tf_keras.Sequential(
        [
            tf_keras.layers.Dense(2, input_shape=(2,)),
            tfp.layers.DistributionLambda(
                lambda t: tfd.Normal(t[:, :1], 1e-3 + tf.nn.softplus(t[:, 1:]))
            ),
        ]
    )
    return Training(
        lambda x, y: -tf.reduce_mean(model(x).log_prob(y)),
        lambda: model.trainable_variables,
        tf_keras.optimizers.legacy.RMSprop(0.05),
        (X, Y),
    )


def gaussian_process() -> Training:
    """A variational Gaussian process, trained by minibatches."""
    amplitude = tfp.util.TransformedVariable(np.float64(1.0), tfb.Exp())
    length = tfp.util.TransformedVariable(np.float64(1.0), tfb.Exp())
    points = np.float64(X[::3])
    mean = tf.Variable(tf.zeros([4], tf.float64))
    scale = tf.Variable(tf.eye(4, dtype=tf.float64))
    kernel = tfp.math.psd_kernels.MaternThreeHalves(amplitude, length)
    model = tfd.VariationalGaussianProcess(
        kernel,
        index_points=tf.constant(points),
        inducing_index_points=tf.constant(points),
        variational_inducing_observations_loc=mean,
        variational_inducing_observations_scale=scale,
        observation_noise_variance=tf.constant(0.1, tf.float64),
        jitter=1e-6,
    )

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        return (
            model.variational_loss(
                observations=y[:, 0],
                observation_index_points=x,
                kl_weight=tf.cast(len(x) / 12, tf.float64),
            )
            / tf.cast(len(x), tf.float64)
            * 12
        )

    return Training(
        loss,
        lambda: [*kernel.trainable_variables, mean, scale],
        tf_keras.optimizers.Adam(0.05),
        (np.float64(X), np.float64(Y)),
    )


@ways
@pytest.mark.parametrize("program", [mixture, flow, regression, gaussian_process])
def test_equals_one_device(program, replicas, options):
    check(program, replicas, options)
