# SPDX-License-Identifier: Apache-2.0
"""Networks and recurrent cores of Sonnet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf

from tests.clients.training import Training, check, ways

RNG = np.random.default_rng(1)
ROWS = RNG.normal(size=[12, 5]).astype(np.float32)
IMAGES = RNG.normal(size=[12, 32, 32, 3]).astype(np.float32)
LABELS = RNG.integers(0, 3, 12)


def _cross_entropy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    )


def mlp() -> Training:
    """Not called before the first step, which creates its variables."""
    net = snt.nets.MLP([8, 3])
    return Training(
        lambda x, labels: _cross_entropy(labels, net(x)),
        lambda: net.trainable_variables,
        snt.optimizers.Adam(0.05),
        (ROWS, LABELS),
    )


def _with_statistics(net: Callable[..., Any]) -> Callable[[tf.Tensor], Any]:
    """Returns a net whose batch norms use moving statistics, of one call before.

    Batch statistics would be those of a replica's share, not of the whole batch.
    """
    net(tf.constant(IMAGES), is_training=True)
    return functools.partial(net, is_training=False)


def convnet() -> Training:
    net = snt.nets.Cifar10ConvNet(num_classes=3, output_channels=(4, 8), strides=(2, 2))
    call = _with_statistics(functools.partial(net, test_local_stats=False))
    return Training(
        lambda x, labels: _cross_entropy(labels, call(x)["logits"]),
        lambda: net.trainable_variables,
        snt.optimizers.Momentum(0.05, 0.9),
        (IMAGES, LABELS),
        lambda: net.variables,
    )


def resnet() -> Training:
    net = snt.nets.ResNet(
        [1, 1, 1, 1], 3, resnet_v2=True, channels_per_group_list=(8, 8, 16, 16)
    )
    call = _with_statistics(net)
    return Training(
        lambda x, labels: _cross_entropy(labels, call(x)),
        lambda: net.trainable_variables,
        snt.optimizers.SGD(0.05),
        (IMAGES, LABELS),
        lambda: net.variables,
    )


def lstm() -> Training:
    core = snt.LSTM(4)
    head = snt.Linear(3)

    def loss(x: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        sequence = tf.transpose(x)[:, :, None]
        outputs, _ = snt.dynamic_unroll(core, sequence, core.initial_state(len(x)))
        return _cross_entropy(labels, head(outputs[-1]))

    return Training(
        loss,
        lambda: [*core.trainable_variables, *head.trainable_variables],
        snt.optimizers.RMSProp(0.05),
        (ROWS, LABELS),
    )


def vector_quantizer() -> Training:
    net = snt.Linear(4)
    quantize = snt.nets.VectorQuantizer(4, 5, 0.25)

    def loss(x: tf.Tensor) -> tf.Tensor:
        quantized = quantize(net(x), is_training=True)
        return quantized["loss"] + tf.reduce_mean(
            (quantized["quantize"] - x[:, :4]) ** 2
        )

    return Training(
        loss,
        lambda: [*net.trainable_variables, *quantize.trainable_variables],
        snt.optimizers.SGD(0.05),
        (ROWS,),
    )


def vector_quantizer_ema() -> Training:
    """Its embeddings are moving sums over moving counts, which the step assigns.

    Replicas agree on the means of these, whose quotients are the embeddings, except for
    epsilon.
    """
    net = snt.Linear(4)
    quantize = snt.nets.VectorQuantizerEMA(4, 5, 0.25, decay=0.9, epsilon=1e-7)

    def loss(x: tf.Tensor) -> tf.Tensor:
        quantized = quantize(net(x), is_training=True)
        return quantized["loss"] + tf.reduce_mean(
            (quantized["quantize"] - x[:, :4]) ** 2
        )

    return Training(
        loss,
        lambda: net.trainable_variables,
        snt.optimizers.SGD(0.05),
        (ROWS,),
        lambda: [quantize.embeddings],
    )


@ways
@pytest.mark.parametrize(
    "program",
    [mlp, convnet, resnet, lstm, vector_quantizer, vector_quantizer_ema],
)
def test_equals_one_device(program, replicas, options):
    check(program, replicas, options)
