# SPDX-License-Identifier: Apache-2.0
"""Models of transformers, from configurations, on tf_keras."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import transformers

from tests.clients.training import Training, check, ways

RNG = np.random.default_rng(1)
TOKENS = RNG.integers(1, 30, [12, 6]).astype(np.int32)
MASK = (np.arange(6) < RNG.integers(2, 7, [12, 1])).astype(np.int32)
LABELS = RNG.integers(0, 3, 12)
IMAGES = RNG.normal(size=[12, 3, 8, 8]).astype(np.float32)
# The bias of attention's keys changes no output: its gradient is rounding errors, which
# Adam with its default epsilon amplifies to full size.
EPSILON = 1e-3
SIZES = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 8,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert() -> Training:
    tf_keras.utils.set_random_seed(1)
    config = transformers.BertConfig(**SIZES, num_labels=3)
    model = transformers.TFBertForSequenceClassification(config)

    def loss(tokens: tf.Tensor, mask: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        output = model(tokens, attention_mask=mask, labels=labels, training=True)
        return tf.reduce_mean(output.loss)

    return Training(
        loss,
        lambda: model.trainable_variables,
        transformers.AdamWeightDecay(0.01, weight_decay_rate=0.1, epsilon=EPSILON),
        (TOKENS, MASK, LABELS),
    )


def gpt2() -> Training:
    tf_keras.utils.set_random_seed(1)
    config = transformers.GPT2Config(
        vocab_size=30,
        n_positions=8,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model = transformers.TFGPT2LMHeadModel(config)
    model(tf.constant(TOKENS))  # as from_pretrained does

    def loss(tokens: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(model(tokens, labels=tokens, training=True).loss)

    return Training(
        loss,
        lambda: model.trainable_variables,
        tf_keras.optimizers.Adam(0.01, epsilon=EPSILON),
        (TOKENS,),
    )


def vit() -> Training:
    tf_keras.utils.set_random_seed(1)
    sizes = {k: v for k, v in SIZES.items() if not k.startswith(("vocab", "max_"))}
    config = transformers.ViTConfig(
        **sizes, image_size=8, patch_size=4, num_channels=3, num_labels=3
    )
    model = transformers.TFViTForImageClassification(config)

    def loss(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(model(images, labels=labels, training=True).loss)

    return Training(
        loss,
        lambda: model.trainable_variables,
        tf_keras.optimizers.legacy.Adam(0.01, epsilon=EPSILON),
        (IMAGES, LABELS),
    )


@ways
@pytest.mark.parametrize("program", [bert, gpt2, vit])
def test_equals_one_device(program, replicas, options):
    check(program, replicas, options)
