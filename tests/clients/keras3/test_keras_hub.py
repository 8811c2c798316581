# SPDX-License-Identifier: Apache-2.0
"""Models of keras-hub, from configurations."""

from __future__ import annotations

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow as tf

from tests.clients.training import Training, check, ways

RNG = np.random.default_rng(1)
LABELS = RNG.integers(0, 3, 12)
# The bias of attention's keys changes no output: its gradient is rounding errors, which
# Adam with its default epsilon amplifies to full size.
EPSILON = 1e-3
IMAGES = RNG.normal(size=[12, 8, 8, 3]).astype(np.float32)
TOKENS = RNG.integers(1, 30, [12, 6])
MASK = np.arange(6) < RNG.integers(2, 7, [12, 1])
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _classifier(model: keras.Model, inputs: tuple[np.ndarray, ...], make_inputs):
    keras.utils.set_random_seed(1)

    def loss(*batch: tf.Tensor) -> tf.Tensor:
        *parts, labels = batch
        return LOSS(labels, model(make_inputs(*parts), training=True))

    return Training(
        loss,
        lambda: model.trainable_variables,
        keras.optimizers.Adam(0.01, epsilon=EPSILON),
        (*inputs, LABELS),
    )


def vit() -> Training:
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=(4, 4),
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )
    model = keras_hub.models.ViTImageClassifier(
        backbone, num_classes=3, preprocessor=None, dropout=0.0
    )
    return _classifier(model, (IMAGES,), lambda x: x)


def bert() -> Training:
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.BertBackbone(
        vocabulary_size=30,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=6,
        dropout=0.0,
    )
    model = keras_hub.models.BertTextClassifier(
        backbone, num_classes=3, preprocessor=None, dropout=0.0
    )
    return _classifier(
        model,
        (TOKENS.astype(np.int32), MASK.astype(np.int32)),
        lambda tokens, mask: {
            "token_ids": tokens,
            "padding_mask": mask,
            "segment_ids": tf.zeros_like(tokens),
        },
    )


def gpt2() -> Training:
    """A causal language model, whose embedding is tied to its output."""
    keras.utils.set_random_seed(1)
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=30,
        num_layers=2,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=6,
        dropout=0.0,
    )
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor=None)

    def loss(tokens: tf.Tensor) -> tf.Tensor:
        inputs = {"token_ids": tokens, "padding_mask": tf.ones_like(tokens)}
        return LOSS(tokens[:, 1:], model(inputs, training=True)[:, :-1])

    return Training(
        loss,
        lambda: model.trainable_variables,
        keras.optimizers.AdamW(0.01, epsilon=EPSILON),
        (TOKENS.astype(np.int32),),
    )


@ways
@pytest.mark.parametrize("program", [vit, bert, gpt2])
def test_equals_one_device(program, replicas, options):
    check(program, replicas, options)
