# SPDX-License-Identifier: Apache-2.0
"""Batch normalization in fit, by the whole batch or by each replica's own rows."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import workloads
from tests import helpers
from tests.keras import worlds

layers = keras.layers
MOMENTUM, RATE = 0.9, 0.5


def made(dtype: str, axis: int = -1) -> Any:
    """Returns a model of images whose scale, offset and kernel are trained."""
    shape = (3, 4, 2) if axis == -1 else (2, 3, 4)
    norm = layers.BatchNormalization(axis=axis, momentum=MOMENTUM, dtype=dtype)
    dense = layers.Dense(1, use_bias=False, dtype=dtype)
    model = keras.Sequential([keras.Input(shape), norm, layers.Flatten(), dense])
    model.compile(keras.optimizers.SGD(RATE), "mse")
    return model


def on_replicas(replicas: int, *args: Any, **options: Any) -> Any:
    keras.utils.set_random_seed(3)
    repl = helpers.make(replicas, **options)
    with repl.context():
        model = made(*args)
    return repl, repl.keras_model(model, local_statistics=True)


def stepped(
    weights: list[np.ndarray], x: np.ndarray, y: np.ndarray, replicas: int
) -> list[np.ndarray]:
    """Returns the weights after a step of SGD, of the last axis' statistics."""
    gamma, beta, moving_mean, moving_variance, kernel = weights
    trained = [tf.constant(one, tf.float64) for one in (gamma, beta, kernel)]
    rows, means, variances = [], [], []
    with tf.GradientTape() as tape:
        tape.watch(trained)
        for part in np.array_split(x.astype(np.float64), replicas):
            mean, variance = part.mean((0, 1, 2)), part.var((0, 1, 2))
            normal = (part - mean) / np.sqrt(variance + 1e-3)
            rows.append(trained[0] * normal + trained[1])
            means.append(mean)
            variances.append(variance)
        z = tf.reshape(tf.concat(rows, 0), [len(x), -1]) @ trained[2]
        loss = tf.reduce_mean((z - y) ** 2)
    gradients = tape.gradient(loss, trained)
    new = [v - RATE * g for v, g in zip(trained, gradients, strict=True)]
    shares = np.array([len(part) for part in np.array_split(x, replicas)]) / len(x)
    moved = [
        MOMENTUM * old + (1 - MOMENTUM) * np.tensordot(shares, np.stack(own), 1)
        for old, own in ((moving_mean, means), (moving_variance, variances))
    ]
    return [np.asarray(one) for one in (*new[:2], *moved, new[2])]


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("float32", 1e-5), ("float64", 1e-6), ("mixed_bfloat16", 0.05)],
)
def test_a_step_of_uneven_shards(dtype: str, tolerance: float) -> None:
    x, y = worlds.numbers(1, 7, 3, 4, 2) * 3 + 1, worlds.numbers(2, 7, 1)
    _, model = on_replicas(3, dtype)
    before = model.get_weights()
    model.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    for have, want in zip(model.get_weights(), stepped(before, x, y, 3), strict=True):
        np.testing.assert_allclose(have, want, tolerance, tolerance)


def test_half_precision() -> None:
    x, y = worlds.numbers(1, 6, 3, 4, 2), worlds.numbers(2, 6, 1)
    _, model = on_replicas(2, "mixed_float16")
    before = model.get_weights()
    model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    found = model.get_weights()[2:4]
    for have, want in zip(found, stepped(before, x, y, 2)[2:4], strict=True):
        np.testing.assert_allclose(have, want, 1e-3, 1e-3)


def test_channels_first_layers_send_one_message_a_step() -> None:
    x, y = worlds.numbers(1, 8, 2, 3, 4), worlds.numbers(2, 8, 1)
    repl, model = on_replicas(2, "float32", 1)
    model.fit(x, y, batch_size=8, verbose=0)
    assert [row.primitive for row in repl.plan.rows] == ["all_reduce"]


def test_replicas_stay_equal_and_evaluation_uses_moving_averages() -> None:
    x, y = worlds.numbers(1, 22, 3, 4, 2), worlds.numbers(2, 22, 1)
    _, model = on_replicas(3, "float32", variables="mirrored")
    model.fit(x, y, batch_size=7, epochs=2, verbose=0)  # batches of 7, 7, 7, 1
    for variable in model.variables:
        first, *others = helpers.components(variable)
        assert all(first.tobytes() == one.tobytes() for one in others), variable.path
    keras.backend.clear_session()
    plain = made("float32")
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(
        model.predict(x, verbose=0), plain.predict(x, verbose=0), 1e-5, 1e-6
    )
    found = model.evaluate(x, y, batch_size=7, verbose=0)
    np.testing.assert_allclose(found, plain.evaluate(x, y, verbose=0), 1e-5)


def test_several_steps_per_execution() -> None:
    x, y = worlds.numbers(1, 12, 3, 4, 2), worlds.numbers(2, 12, 1)
    repl, model = on_replicas(2, "float32")
    weights = model.get_weights()
    with repl.context():
        model.compile(keras.optimizers.SGD(RATE), "mse", steps_per_execution=2)
    model.fit(x, y, batch_size=6, shuffle=False, verbose=0)
    for k in (0, 6):
        weights = stepped(weights, x[k : k + 6], y[k : k + 6], 2)
    for have, want in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_allclose(have, want, 1e-4, 1e-5)


# The statistics of the whole batch: the messages.


def branched(branches: int, depth: int) -> keras.Model:
    """Returns a model whose branches of normalized layers are added up."""
    x = keras.Input([4])
    outputs = []
    for _ in range(branches):
        y = x
        for _ in range(depth):
            y = layers.BatchNormalization()(layers.Dense(4, activation="tanh")(y))
        outputs.append(y)
    total = layers.Add()(outputs) if branches > 1 else outputs[0]
    model = keras.Model(x, layers.Dense(1)(total))
    model.compile("adam", "mse")
    return model


def messages(make: Any, x: np.ndarray, y: np.ndarray) -> int:
    repl = helpers.make(2)
    with repl.context():
        model = make()
    repl.keras_model(model).fit(x, y, batch_size=len(x), verbose=0)
    assert {row.primitive for row in repl.plan.rows} == {"all_reduce"}
    return len(repl.plan.rows)


@pytest.mark.parametrize(("branches", "depth"), [(1, 1), (1, 3), (3, 1), (2, 2)])
def test_a_layer_is_a_message_forward_and_one_backward(
    branches: int, depth: int
) -> None:
    """Those of independent layers are the same messages; gradients are one more."""
    x, y = worlds.numbers(1, 8, 4), worlds.numbers(2, 8, 1)
    count = messages(lambda: branched(branches, depth), x, y)
    assert count == 2 * depth + 1


@pytest.mark.slow
def test_messages_of_a_residual_network() -> None:
    """Its 21 layers are 19 one behind the other, and 2 on shortcuts."""
    workload = next(w for w in workloads.WORKLOADS if w.name == "resnet20")

    def make() -> keras.Model:
        model = workload.make_model()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        return model

    assert messages(make, *workload.network.batch(4)) == 2 * 19 + 1
