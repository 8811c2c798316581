# SPDX-License-Identifier: Apache-2.0
"""Files hold partitioned variables whole, and load into any partition or none."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.variables import parted

TABLE = np.random.RandomState(0).randn(9, 4).astype(np.float32)
IDS = np.array([[1, 8], [6, 3], [0, 2], [4, 5], [7, 3], [1, 1]])
WAYS = {
    "rows on 2": lambda: parted.replicas(2),
    "columns on 3": lambda: parted.replicas(3, parted.InParts(3, 1)),
    "whole": parted.one_device,
}
PAIRS = [pair for pair in itertools.product(WAYS, WAYS) if pair != ("whole", "whole")]


@pytest.mark.battery(5)
@pytest.mark.parametrize("saved, loaded", PAIRS)
def test_checkpoints(saved: str, loaded: str, tmp_path: pathlib.Path) -> None:
    def made(way: str, scale: float) -> Any:
        repl = WAYS[way]()
        with repl.context():
            v = tf.Variable(TABLE * scale, name="table")
            optimizer = repl.wrap_optimizer(keras.optimizers.Adam(0.1))

        def step_fn() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(v**2)
            optimizer.apply([tape.gradient(loss, v)], [v])

        return v, optimizer, lambda: repl.run(step_fn)

    v, optimizer, step = made(saved, 1.0)
    step()
    path = tf.train.Checkpoint(v=v, optimizer=optimizer).save(str(tmp_path / "c"))
    listed = dict(tf.train.list_variables(path))
    assert list(listed.values()).count([9, 4]) == 3
    other, other_optimizer, other_step = made(loaded, 2.0)
    status = tf.train.Checkpoint(v=other, optimizer=other_optimizer).restore(path)
    np.testing.assert_array_equal(other.numpy(), v.numpy())
    step()
    other_step()
    status.assert_consumed()
    np.testing.assert_allclose(other.numpy(), v.numpy(), rtol=1e-5)
    for one, two in zip(optimizer.variables, other_optimizer.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), two.numpy(), rtol=1e-5)


def test_names_in_checkpoints_are_those_of_wholes(tmp_path: pathlib.Path) -> None:
    listed = []
    for way in ("whole", "rows on 2"):
        repl = WAYS[way]()
        with repl.context():
            v = tf.Variable(TABLE, name="table")
            optimizer = repl.wrap_optimizer(keras.optimizers.Adam(0.1))
            optimizer.build([v])
        path = tf.train.Checkpoint(v=v, optimizer=optimizer).save(str(tmp_path / way))
        listed.append(tf.train.list_variables(path))
    assert listed[0] == listed[1]


def model() -> Any:
    return keras.Sequential(
        [
            keras.layers.Input([2], dtype="int32"),
            keras.layers.Embedding(9, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )


@pytest.mark.slow
def test_keras_fits_and_its_files_load_everywhere(tmp_path: pathlib.Path) -> None:
    y = np.ones([6, 5], np.float32)
    histories, models = [], []
    for way in ("whole", "rows on 2"):
        repl = WAYS[way]()
        keras.utils.set_random_seed(3)
        with repl.context():
            fitted = model()
            fitted.compile(repl.wrap_optimizer(keras.optimizers.Adam(0.1)), "mse")
        repl.keras_model(fitted)
        history = fitted.fit(IDS, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
        histories.append(history.history["loss"])
        models.append(fitted)
    np.testing.assert_allclose(histories[0], histories[1], rtol=1e-5)
    for one, two in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(one, two, atol=1e-5)
    weights, file = tmp_path / "a.weights.h5", tmp_path / "a.keras"
    models[1].save_weights(weights)
    models[1].save(file)
    expected = models[1].predict(IDS, verbose=0)
    plain = model()
    plain.load_weights(weights)
    np.testing.assert_allclose(plain.predict(IDS, verbose=0), expected, rtol=1e-5)
    with WAYS["columns on 3"]().context():
        loaded = keras.models.load_model(file)
    np.testing.assert_allclose(loaded.predict(IDS, verbose=0), expected, rtol=1e-5)
    pairs = zip(loaded.optimizer.variables, models[1].optimizer.variables, strict=True)
    for one, two in pairs:
        np.testing.assert_allclose(one.numpy(), two.numpy())
    models[1].set_weights([2 * w for w in plain.get_weights()])
    np.testing.assert_allclose(models[1].get_weights()[0], 2 * plain.get_weights()[0])


def test_a_saver_loads_into_other_parts(tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "v")
    for way, value in (("rows on 2", TABLE), ("columns on 3", 0 * TABLE)):
        with tf.Graph().as_default():
            repl = WAYS[way]()
            with repl.context():
                v = tf.Variable(value, name="table")
            saver = tf.compat.v1.train.Saver()
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                if way == "rows on 2":
                    saver.save(session, path)
                    assert tf.train.list_variables(path) == [("table", [9, 4])]
                else:
                    saver.restore(session, path)
                    np.testing.assert_array_equal(session.run(v), TABLE)


def test_a_saved_model_holds_the_whole(tmp_path: pathlib.Path) -> None:
    with WAYS["rows on 2"]().context():
        v = tf.Variable(TABLE, name="table")
    module = tf.Module()
    module.v = v
    module.look_up = tf.function(
        lambda ids: tf.gather(v, ids) + tf.reduce_sum(v),
        input_signature=[tf.TensorSpec([None], tf.int32)],
    )
    expected = module.look_up(tf.constant([1, 8]))
    tf.saved_model.save(module, str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    np.testing.assert_allclose(loaded.look_up(tf.constant([1, 8])), expected, rtol=1e-6)
    np.testing.assert_array_equal(loaded.v.numpy(), TABLE)
