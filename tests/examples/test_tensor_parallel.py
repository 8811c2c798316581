# SPDX-License-Identifier: Apache-2.0
"""examples/tensor_parallel.py: a divided transformer trains like a whole one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.examples import programs

parallel = programs.load("tensor_parallel")

BATCH, STEPS = 32, 3
# The axes along which matrices are divided.
AXES = {"qkv": 2, "out": 0, "up": 1, "down": 0}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    patches, labels = parallel.load_examples()[0]
    rows = slice(step * BATCH, (step + 1) * BATCH)
    return patches[rows], labels[rows]


def whole(variables: dict[str, tf.Variable]) -> dict[str, np.ndarray]:
    """Returns the values of all variables, with parts joined."""
    parts: dict[str, list[np.ndarray]] = {}
    for name, variable in variables.items():
        parts.setdefault(name.split("/part_")[0], []).append(variable.numpy())
    return {
        name: own[0] if len(own) == 1 else np.concatenate(own, AXES[name.split("/")[1]])
        for name, own in parts.items()
    }


class Positions(tf.keras.layers.Layer):
    """Adds learned position embeddings."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=shape[1:])

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return x + self.kernel


def reference(weights: dict[str, np.ndarray]) -> tuple[tf.keras.Model, Any]:
    """Returns the transformer in Keras' own layers, and a reader of its weights.

    Args:
        weights: The initial weights.
    """
    layers, names = tf.keras.layers, []

    def known(layer: Any, x: Any, *own: str) -> Any:
        output = layer(*x) if isinstance(x, tuple) else layer(x)
        names.append((layer, own))
        return output

    def dense(width: int, activation: Any = None) -> Any:
        return layers.Dense(width, activation, use_bias=False)

    inputs = layers.Input((parallel.TOKENS, parallel.PATCH))
    x = known(dense(parallel.WIDTH), inputs, "embedding")
    x = known(Positions(), x, "positions")
    for b in range(parallel.BLOCKS):
        norm = layers.LayerNormalization(epsilon=1e-3)
        y = known(norm, x, f"block_{b}/norm_1/scale", f"block_{b}/norm_1/offset")
        attention = layers.MultiHeadAttention(
            parallel.HEADS, parallel.WIDTH // parallel.HEADS, use_bias=False
        )
        x = x + known(attention, (y, y), f"block_{b}/qkv", f"block_{b}/out")
        norm = layers.LayerNormalization(epsilon=1e-3)
        y = known(norm, x, f"block_{b}/norm_2/scale", f"block_{b}/norm_2/offset")
        y = known(dense(parallel.HIDDEN, tf.nn.gelu), y, f"block_{b}/up")
        x = x + known(dense(parallel.WIDTH), y, f"block_{b}/down")
    pooled = layers.GlobalAveragePooling1D()(x)
    outputs = known(dense(parallel.CLASSES), pooled, "logits")
    for layer, own in names:
        values = [weights[name] for name in own]
        if own[0].endswith("qkv"):
            values = [*values[0].swapaxes(0, 1), values[1]]
        layer.set_weights(values)

    def read() -> dict[str, np.ndarray]:
        found = {}
        for layer, own in names:
            values = layer.get_weights()
            if own[0].endswith("qkv"):
                values = [np.stack(values[:3], axis=1), values[3]]
            found.update(zip(own, values, strict=True))
        return found

    return tf.keras.Model(inputs, outputs), read


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses and weights of Keras' own layers, without Replicator."""
    begun = parallel.Training(["CPU:0"])
    model, read = reference(whole(begun.model.variables))
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(2e-3), loss)
    losses = [float(model.train_on_batch(*batch(step))) for step in range(STEPS)]
    return losses, read()


@pytest.mark.battery(5)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_a_divided_transformer_trains_as_one_of_keras_does(
    replicas: int,
    sequence_parallel: bool,
    plain: tuple[list[float], dict[str, np.ndarray]],
) -> None:
    training = parallel.Training(
        [f"CPU:{r}" for r in range(replicas)], sequence_parallel=sequence_parallel
    )
    step = training.repl.build(
        training.train_step,
        lambda ctx: tf.data.Dataset.from_tensor_slices(
            tuple(map(np.stack, zip(*map(batch, range(STEPS)), strict=True)))
        ),
    )
    losses = [[float(loss) for loss in step()] for _ in range(STEPS)]

    for own, expected in zip(losses, plain[0], strict=True):
        np.testing.assert_allclose(own, [expected] * replicas, rtol=0, atol=1e-5)
    weights = whole(training.model.variables)
    assert weights.keys() == plain[1].keys()
    for name, expected in plain[1].items():
        np.testing.assert_allclose(weights[name], expected, rtol=0, atol=2e-5)


def test_each_replica_holds_its_parts_and_what_the_optimizer_keeps_of_them() -> None:
    training = parallel.Training(["CPU:0", "CPU:1"])
    variables = training.model.variables
    parts = {name: v for name, v in variables.items() if "/part_" in name}
    assert len(parts) == 2 * 4 * parallel.BLOCKS
    slots = [v for v in training.optimizer.variables if "part_" in v.path]
    assert len(slots) == 2 * len(parts)  # Adam's two moments
    for name, variable in [*parts.items(), *((v.path, v.value) for v in slots)]:
        number = name.split("part_")[1][0]
        assert {c.device[-5:] for c in variable.components} == {f"CPU:{number}"}


_LAYERS = 2 * parallel.BLOCKS


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"all_gather": _LAYERS, "reduce_scatter": _LAYERS, "all_reduce": 1}),
        ({"sequence_parallel": False}, {"all_reduce": _LAYERS}),
    ],
)
def test_between_the_matrices_of_a_layer_nothing_travels(
    options: dict[str, bool], expected: dict[str, int]
) -> None:
    training = parallel.Training(["CPU:0", "CPU:1"], **options)
    step = training.repl.build(training.eval_step, lambda ctx: (*batch(0), 1.0))
    actual = {
        name: sums.per_step.communications
        for name, sums in step.plan.by_primitive.items()
    }
    assert actual == expected
