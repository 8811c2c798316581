# SPDX-License-Identifier: Apache-2.0
"""Variables with one owner: their placement, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers

REPLICAS = 3


def _dense(units: int) -> tf.keras.layers.Layer:
    return tf.keras.layers.Dense(units, "relu")


def _model() -> tf.keras.Model:
    tf.keras.utils.set_random_seed(3)
    return tf.keras.Sequential(
        [tf.keras.layers.Input((6,)), _dense(32), _dense(32), _dense(32), _dense(2)]
    )


def _train(variables: str, optimizer: Callable[[], Any], steps: int) -> Any:
    """Trains a model; returns it, its optimizer and the losses."""
    # Owners add up in replica order, as a hub does.
    repl = helpers.make(REPLICAS, variables=variables, factors=False, algorithm="hub")
    with repl.context():
        model, wrapped = _model(), repl.wrap_optimizer(optimizer())
    batches = np.random.default_rng(0).standard_normal((REPLICAS, 8, 6), np.float32)

    def step_fn(batch: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(batch) - 1.0))
        weights = model.trainable_variables
        wrapped.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return repl.all_reduce(loss, "mean")

    def input_fn(ctx: Any) -> tf.Tensor:
        return tf.constant(batches[ctx.replica_id])

    losses = [repl.run(step_fn, input_fn)[0].numpy() for _ in range(steps)]
    return model, wrapped, losses


OPTIMIZERS = {
    "momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.01),
    "clipped": lambda: tf.keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "averaged": lambda: tf.keras.optimizers.Adam(
        0.01, use_ema=True, ema_overwrite_frequency=2
    ),
    "scaled": lambda: tf.keras.optimizers.LossScaleOptimizer(
        tf.keras.optimizers.Adam(0.01)
    ),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_the_same_bits_as_with_mirrored_variables(name: str) -> None:
    mirrored, _, expected = _train("mirrored", OPTIMIZERS[name], 4)
    sharded, _, losses = _train("sharded", OPTIMIZERS[name], 4)
    assert losses == expected
    for one, other in zip(mirrored.variables, sharded.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_slots_are_owned_with_their_variables_and_bytes_are_balanced(name: str) -> None:
    model, optimizer, _ = _train("sharded", OPTIMIZERS[name], 1)
    owners = {v.path: v.value.owner for v in model.trainable_variables}
    assert None not in owners.values()
    owned = [0] * REPLICAS
    for variable in model.variables:
        owned[variable.value.owner] += variable.value.shape.num_elements()
    largest = max(v.value.shape.num_elements() for v in model.variables)
    assert max(owned) - min(owned) <= largest + 64
    slots = [v for v in optimizer.variables if v.value.shape.rank]
    assert len(slots) % len(owners) == 0
    in_order = [v.value.owner for v in model.trainable_variables]
    count = len(in_order)
    kinds = len(slots) // count
    actual = sorted(v.value.owner for v in slots)
    assert actual == sorted(in_order * kinds)
    for slot in slots:
        (path,) = [p for p in owners if slot.name.startswith(p.replace("/", "_") + "_")]
        assert slot.value.owner == owners[path]


def test_each_stands_on_one_device_and_what_may_differ_on_all() -> None:
    repl = helpers.make(REPLICAS, variables="sharded")
    with repl.context():
        owned = [tf.Variable(tf.zeros([2, 2])) for _ in range(REPLICAS)]
        counter = tf.Variable(0)
        scale = tf.Variable(1.0)
        metric = tf.keras.metrics.Mean()
        generator = tf.random.Generator.from_seed(1)
    for r, variable in enumerate(owned):
        assert variable.owner == r
        assert variable.components == (variable.components[0],) * REPLICAS
        assert variable.components[0].handle.device == repl.devices[r]
    local = [counter, scale, generator.state]
    local += [v.value for v in metric.variables]
    for variable in local:
        assert variable.owner is None
        assert len({id(component) for component in variable.components}) == REPLICAS


def test_a_checkpoint_holds_plain_variables(tmp_path: Any) -> None:
    model, optimizer, _ = _train("sharded", OPTIMIZERS["adam"], 2)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    plain = _model()
    tf.train.Checkpoint(model=plain).restore(path).expect_partial()
    for one, other in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    again, wrapped, _ = _train("sharded", OPTIMIZERS["adam"], 1)
    tf.train.Checkpoint(model=again, optimizer=wrapped).restore(path).assert_consumed()
    pairs = zip(
        [*model.variables, *optimizer.variables],
        [*again.variables, *wrapped.variables],
        strict=True,
    )
    for one, other in pairs:
        np.testing.assert_array_equal(one.numpy(), other.numpy())
