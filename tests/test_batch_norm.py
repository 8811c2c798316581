# SPDX-License-Identifier: Apache-2.0
"""Batch normalization over all replicas, by the layers of Keras and Sonnet, unchanged.

The reference is the same library's own layer, plain, on one device and the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf

from tests import helpers

EVEN = [(4,), (3, 3), (2, 2, 2, 2)]
UNEVEN = [(3, 1), (1, 4, 2), (2, 5, 0, 1)]
CHANNELS = 3
EPSILON = 1e-3

Outcome = dict[str, np.ndarray]


def batch(rows: int, *inner: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs, [rows, *inner, CHANNELS], and the outputs' weights in a loss."""
    random = np.random.default_rng(rows)
    shape = [rows, *inner, CHANNELS]
    inputs = random.normal([1.0, -2.0, 0.5], [1.0, 3.0, 0.2], shape)
    return inputs.astype(np.float32), random.normal(size=shape).astype(np.float32)


def split(array: np.ndarray, shards: Sequence[int]) -> list[np.ndarray]:
    return np.split(array, np.cumsum(shards)[:-1])


def keras_layer(synchronized: bool) -> tf.keras.layers.Layer:
    return tf.keras.layers.BatchNormalization(
        synchronized=synchronized,
        momentum=0.5,
        epsilon=EPSILON,
        gamma_initializer=tf.keras.initializers.Constant(1.5),
        beta_initializer=tf.keras.initializers.Constant(0.25),
    )


def sonnet_layer(synchronized: bool) -> snt.Module:
    kind = snt.distribute.CrossReplicaBatchNorm if synchronized else snt.BaseBatchNorm
    return kind(
        create_scale=True,
        create_offset=True,
        moving_mean=snt.ExponentialMovingAverage(0.5),
        moving_variance=snt.ExponentialMovingAverage(0.5),
        eps=EPSILON,
        scale_init=snt.initializers.Constant(1.5),
        offset_init=snt.initializers.Constant(0.25),
    )


def call_keras(layer: Any, inputs: tf.Tensor) -> tf.Tensor:
    return layer(inputs, training=True)


def call_sonnet(layer: Any, inputs: tf.Tensor) -> tf.Tensor:
    return layer(inputs, is_training=True)


def parameters(layer: Any) -> list[Any]:
    """Returns the scale and the offset, in this order."""
    if isinstance(layer, snt.Module):
        return [layer.scale, layer.offset]
    return [layer.gamma, layer.beta]


def statistics(layer: Any) -> list[Any]:
    """Returns the moving mean and the moving variance, in this order."""
    if isinstance(layer, snt.Module):
        averages = layer.moving_mean.value, layer.moving_variance.value
        return [tf.reshape(average, [-1]) for average in averages]
    return [layer.moving_mean, layer.moving_variance]


LIBRARIES = {
    "keras": (keras_layer, call_keras),
    "sonnet": (sonnet_layer, call_sonnet),
}


def differentiate(
    layer: Any, call: Callable[..., tf.Tensor], inputs: Any, weights: Any
) -> dict[str, Any]:
    """Returns the layer's outputs and the gradients of their weighted sum."""
    inputs = tf.convert_to_tensor(inputs)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        outputs = call(layer, inputs)
        loss = tf.reduce_sum(outputs * weights)
    gradients = tape.gradient(loss, [inputs, *parameters(layer)])
    return dict(zip(["inputs", "scale", "offset"], gradients, strict=True)) | {
        "outputs": outputs
    }


def on_one_device(library: str, inputs: np.ndarray, weights: np.ndarray) -> Outcome:
    make_layer, call = LIBRARIES[library]
    layer = make_layer(synchronized=False)
    outcome = differentiate(layer, call, inputs, weights)
    mean, variance = statistics(layer)
    outcome |= {"mean": mean, "variance": variance}
    return {name: np.reshape(value, np.shape(value)) for name, value in outcome.items()}


def on_replicas(
    library: str,
    inputs: np.ndarray,
    weights: np.ndarray,
    shards: Sequence[int],
    mode: str = "eager",
) -> Outcome:
    """Returns the same for shards of the batch, concatenated."""
    make_layer, call = LIBRARIES[library]
    repl = helpers.make(len(shards))

    def make_step() -> Callable[[], Any]:
        layer = make_layer(synchronized=True)

        def step_fn() -> Any:
            shard = [
                helpers.opaque(
                    split(array, shards)[repl.replica_id], [None, *array.shape[1:]]
                )
                for array in (inputs, weights)
            ]
            outcome = differentiate(layer, call, *shard)
            with tf.control_dependencies([outcome["outputs"]]):
                mean, variance = map(tf.convert_to_tensor, statistics(layer))
            return outcome | {"mean": mean, "variance": variance}

        return step_fn

    actual = helpers.run(mode, repl, make_step)
    joined = {name: np.concatenate(actual[name]) for name in ("inputs", "outputs")}
    summed = {name: np.sum(actual[name], axis=0) for name in ("scale", "offset")}
    for name in ("mean", "variance"):
        assert len({value.tobytes() for value in actual[name]}) == 1
    return joined | summed | {name: actual[name][0] for name in ("mean", "variance")}


def assert_close(found: Outcome, expected: Outcome) -> None:
    for name, value in expected.items():
        # float32, and E[x^2] - E[x]^2 in place of E[(x - E[x])^2]
        np.testing.assert_allclose(
            found[name].reshape(value.shape),
            value,
            rtol=2e-4,
            atol=2e-4,
            err_msg=name,
        )


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("library", LIBRARIES)
def test_it_normalizes_by_the_whole_batch(library: str, mode: str) -> None:
    inputs, weights = batch(6)
    actual = on_replicas(library, inputs, weights, (3, 3), mode)
    assert_close(actual, on_one_device(library, inputs, weights))


@pytest.mark.battery(5)
@pytest.mark.parametrize("shards", EVEN, ids=str)
@pytest.mark.parametrize("library", LIBRARIES)
def test_even_shards_of_volumes(library: str, shards: Sequence[int]) -> None:
    """Rank 5, since for rank 4 Sonnet's plain layer takes the unbiased variance."""
    inputs, weights = batch(sum(shards), 2, 1, 2)
    actual = on_replicas(library, inputs, weights, shards)
    assert_close(actual, on_one_device(library, inputs, weights))


@pytest.mark.parametrize("shards", UNEVEN, ids=str)
def test_keras_counts_the_rows_of_uneven_shards(shards: Sequence[int]) -> None:
    """It all-reduces sums and counts, so empty shards do no harm either."""
    inputs, weights = batch(sum(shards))
    actual = on_replicas("keras", inputs, weights, shards)
    assert_close(actual, on_one_device("keras", inputs, weights))


def by_mean_of_means(
    inputs: np.ndarray, weights: np.ndarray, shards: Sequence[int]
) -> Outcome:
    """Sonnet's result: each shard's mean has the same weight, whatever its size."""
    x = tf.constant(inputs, tf.float64)
    scale = tf.constant([1.5] * CHANNELS, tf.float64)
    offset = tf.constant([0.25] * CHANNELS, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch([x, scale, offset])
        pieces = tf.split(x, shards)
        mean = tf.add_n([tf.reduce_mean(piece, 0) for piece in pieces]) / len(shards)
        squares = [tf.reduce_mean(piece**2, 0) for piece in pieces]
        variance = tf.add_n(squares) / len(shards) - mean**2
        outputs = (x - mean) / tf.sqrt(variance + EPSILON) * scale + offset
        loss = tf.reduce_sum(outputs * weights)
    gradients = tape.gradient(loss, [x, scale, offset])
    results = dict(zip(["inputs", "scale", "offset"], gradients, strict=True))
    results |= {"outputs": outputs, "mean": mean, "variance": variance}
    return {name: value.numpy() for name, value in results.items()}


@pytest.mark.parametrize("shards", [(3, 1), (1, 4, 2)], ids=str)
def test_sonnet_takes_the_mean_of_the_means_of_uneven_shards(
    shards: Sequence[int],
) -> None:
    inputs, weights = batch(sum(shards))
    actual = on_replicas("sonnet", inputs, weights, shards)
    assert_close(actual, by_mean_of_means(inputs, weights, shards))
    whole = on_one_device("sonnet", inputs, weights)
    assert np.max(np.abs(actual["mean"] - whole["mean"])) > 0.05


def test_an_empty_shard_makes_sonnets_means_nan() -> None:
    inputs, weights = batch(3)
    actual = on_replicas("sonnet", inputs, weights, (3, 0))
    assert np.all(np.isnan(actual["mean"]))


@pytest.mark.parametrize("synchronized", [True, False])
def test_moving_statistics_stay_equal_while_a_model_trains(synchronized: bool) -> None:
    repl = helpers.make(2)
    inputs, _ = batch(6)
    with repl.context():
        layer = keras_layer(synchronized)
        model = tf.keras.Sequential([layer, tf.keras.layers.Dense(1)])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))

    def step_fn() -> tf.Tensor:
        shard = helpers.opaque(split(inputs, (2, 4))[repl.replica_id], [None, CHANNELS])
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(shard, training=True) - 1.0) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    losses = [np.mean(repl.run(step_fn)) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    helpers.assert_replicas_equal(model.variables)
    whole = np.mean(inputs, axis=0)
    right = np.allclose(layer.moving_mean, whole, atol=1e-3)
    assert right == synchronized


@pytest.mark.parametrize(
    "options", [{"algorithm": "shuffled"}, {"variables": "sharded"}], ids=str
)
def test_moving_statistics_are_the_same_bits_with_other_options(options: Any) -> None:
    """TensorFlow must not merge our sums with the layer's under some options only."""
    rng = np.random.RandomState(0)
    batches = rng.randn(3, 2, 8, 6).astype(np.float32)

    def train(**chosen: Any) -> list[bytes]:
        repl = helpers.make(2, factors=False, **chosen)
        with repl.context():
            layer = tf.keras.layers.BatchNormalization()
            layer.build([None, 6])

        def step(number: tf.Tensor) -> tf.Tensor:
            return layer(tf.constant(batches)[number, repl.replica_id], training=True)

        run = repl.build(step, lambda: tf.data.Dataset.range(6).map(lambda k: k // 2))
        for _ in batches:
            run()
        return [v.numpy().tobytes() for v in layer.variables]

    assert train(**options) == train(algorithm="hub")
