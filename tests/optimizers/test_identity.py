# SPDX-License-Identifier: Apache-2.0
"""A wrapped optimizer passes for its own class: type, config, checkpoints, Keras."""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

from tests import helpers

kopt = tf.keras.optimizers
legacy = tf_keras.optimizers
v1 = tf.compat.v1

FAMILIES = {
    "keras": lambda: kopt.Adam(
        kopt.schedules.CosineDecay(0.1, 10), weight_decay=0.01, name="own"
    ),
    "loss_scale": lambda: kopt.LossScaleOptimizer(
        kopt.SGD(0.1, momentum=0.5, name="inner"), name="outer"
    ),
    "legacy": lambda: legacy.Adam(
        legacy.schedules.CosineDecay(0.1, 10), weight_decay=0.01, name="own"
    ),
    "legacy_loss_scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        legacy.SGD(0.1, momentum=0.5, name="inner")
    ),
    "older": lambda: legacy.legacy.Adam(0.1, name="own"),
    "older_loss_scale": lambda: tf_keras.mixed_precision.LossScaleOptimizer(
        legacy.legacy.SGD(0.1, momentum=0.5, name="inner")
    ),
    "v1": lambda: v1.train.AdamOptimizer(0.1),
    "sonnet": lambda: snt.optimizers.Adam(0.1),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_is_an_instance_of_its_class(name: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        plain = FAMILIES[name]()
        wrapped = repl.wrap_optimizer(plain)
    assert isinstance(wrapped, type(plain))
    assert type(wrapped).__name__ == type(plain).__name__
    assert type(wrapped).__module__ == type(plain).__module__
    assert not isinstance(plain, type(wrapped))  # the class itself is not patched


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in ("v1", "sonnet")]
)
def test_config_is_that_of_the_plain_optimizer(name: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        wrapped = repl.wrap_optimizer(FAMILIES[name]())
    plain = FAMILIES[name]()
    assert wrapped.get_config() == plain.get_config()
    of_keras_3 = isinstance(plain, kopt.Optimizer)
    package: Any = kopt if of_keras_3 else legacy
    saved = package.serialize(wrapped)
    assert saved == package.serialize(plain)
    options = {} if of_keras_3 else {"use_legacy_optimizer": "older" in name}
    assert type(package.deserialize(copy.deepcopy(saved), **options)) is type(plain)


def test_from_config_gives_another_working_optimizer() -> None:
    """Also with accumulation: each optimizer has its own sums."""
    repl = helpers.make(2)
    with repl.context():
        w = tf.Variable(1.0)
        first = repl.wrap_optimizer(kopt.SGD(1.0), accumulation_steps=2)
        second = type(first).from_config(first.get_config())
    assert isinstance(second, kopt.SGD)

    def step_fn() -> None:
        first.apply([tf.constant(1.0)], [w])
        second.apply([tf.constant(10.0 + repl.replica_id)], [w])

    repl.run(step_fn)
    assert w.numpy() == 1.0
    repl.run(step_fn)
    assert w.numpy() == 1.0 - 1.0 - 10.5


def _checkpoint(
    path: pathlib.Path,
    make: Callable[[], Any],
    wrap: Callable[[Any], Any],
    run: Callable[[Callable[[], Any]], Any],
) -> list[Any]:
    w, table = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([3, 2]))
    optimizer = wrap(make())

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(w * w) + tf.reduce_sum(tf.gather(table, [0, 2]))
        grads = tape.gradient(loss, [w, table])
        if hasattr(optimizer, "apply"):
            optimizer.apply(grads, [w, table])
        else:
            optimizer.apply_gradients(zip(grads, [w, table], strict=True))

    run(step_fn)
    run(step_fn)
    checkpoint = tf.train.Checkpoint(optimizer=optimizer, w=w, table=table)
    return tf.train.list_variables(checkpoint.save(str(path / "c")))


@pytest.mark.battery(10)
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoint_keys_are_those_of_the_plain_optimizer(
    name: str, accumulation_steps: int, tmp_path: pathlib.Path
) -> None:
    repl = helpers.make(2)
    plain = _checkpoint(
        tmp_path / "plain", FAMILIES[name], lambda o: o, lambda f: tf.function(f)()
    )

    def wrap(optimizer: Any) -> Any:
        return repl.wrap_optimizer(optimizer, accumulation_steps=accumulation_steps)

    with repl.context():
        own = _checkpoint(tmp_path / "own", FAMILIES[name], wrap, repl.run)
    sums = [key for key, _ in own if "/replicator_sums/" in key]
    # Of a matrix, of a table's rows and their indices, and the number of steps.
    assert len(sums) == (4 if accumulation_steps > 1 else 0)
    assert [pair for pair in own if pair[0] not in sums] == plain


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_saver_keys_are_those_of_the_plain_optimizer(accumulation_steps: int) -> None:
    def names(repl: Any) -> list[str]:
        with tf.Graph().as_default():

            def step_fn() -> Any:
                w = v1.get_variable("w", initializer=[1.0, 2.0])
                unused = v1.get_variable("unused", initializer=1.0)
                optimizer = v1.train.AdamOptimizer(0.1)
                if repl:
                    optimizer = repl.wrap_optimizer(
                        optimizer, accumulation_steps=accumulation_steps
                    )
                return optimizer.minimize(w * w, var_list=[w, unused])

            repl.run(step_fn) if repl else step_fn()
            return sorted(variable.name for variable in v1.global_variables())

    checkpoint_names = names(helpers.make(2))
    sums = [
        name
        for name in checkpoint_names
        if name.startswith("AdamOptimizer/accumulator/")
    ]
    assert len(sums) == (2 if accumulation_steps > 1 else 0)
    assert [name for name in checkpoint_names if name not in sums] == names(None)


def _model() -> tf.keras.Model:
    return tf.keras.Sequential(
        [tf.keras.layers.Input((3,)), tf.keras.layers.Dense(2, name="dense")]
    )


def test_compile_and_fit_outside_a_step() -> None:
    """Outside a step it is a plain optimizer, over all components."""
    repl = helpers.make(2)
    x, y = np.ones([4, 3], "f"), np.ones([4, 2], "f")
    with repl.context():
        model = _model()
        optimizer = repl.wrap_optimizer(kopt.SGD(0.1, momentum=0.5))
        optimizer.build(model.trainable_variables)
    plain = _model()
    plain.set_weights(model.get_weights())
    model.compile(optimizer, "mse")
    plain.compile(kopt.SGD(0.1, momentum=0.5), "mse")
    assert model.optimizer is optimizer
    for each in (model, plain):
        each.fit(x, y, batch_size=2, epochs=2, verbose=0, shuffle=False)
    helpers.assert_replicas_equal([*model.variables, *optimizer.variables])
    for one, two in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


def test_slots_made_by_fit_outside_the_context_go_on_in_a_step() -> None:
    def trained(model: Any, optimizer: Any, run: Any) -> list[np.ndarray]:
        for k, variable in enumerate(model.trainable_variables):
            variable.assign(tf.fill(variable.shape, 0.1 * (k + 1)))
        model.compile(optimizer, "mse")
        model.fit(np.ones([4, 3], "f"), np.ones([4, 2], "f"), verbose=0)
        variables = model.trainable_variables
        grads = [tf.ones_like(variable) for variable in variables]
        run(lambda: optimizer.apply(grads, variables))
        return model.get_weights()

    repl = helpers.make(2)
    with repl.context():
        model = _model()
        optimizer = repl.wrap_optimizer(kopt.SGD(0.1, momentum=0.5))
    actual = trained(model, optimizer, repl.run)
    expected = trained(_model(), kopt.SGD(0.1, momentum=0.5), lambda step: step())
    for one, two in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


def test_saved_model_file_holds_the_plain_optimizer(tmp_path: pathlib.Path) -> None:
    repl = helpers.make(2)
    with repl.context():
        model = _model()
        optimizer = repl.wrap_optimizer(kopt.Adam(0.1))
        model.compile(optimizer, "mse")

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones([2, 3])) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    repl.run(step_fn)
    model.save(tmp_path / "model.keras")
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is kopt.Adam
    assert loaded.optimizer.iterations.numpy() == 1
    for one, two in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), two.numpy())
    with repl.context():  # a model that is loaded in the context continues to train
        again = tf.keras.models.load_model(tmp_path / "model.keras")
        repl.wrap_optimizer(again.optimizer)
