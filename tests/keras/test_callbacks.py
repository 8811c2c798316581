# SPDX-License-Identifier: Apache-2.0
"""Callbacks see and change the same as in Keras."""

from __future__ import annotations

import csv
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras import worlds
from tests.keras.worlds import World, check, classifier, labels, numbers

X, Y = numbers(0, 17, 8), labels(0, 17)
FIT: dict[str, Any] = {"batch_size": 7, "shuffle": False, "verbose": 0}
callbacks = keras.callbacks


def _fit(world: World, *used: Any, epochs: int = 3, **options: Any) -> Any:
    model = world.made(lambda: classifier(**options))
    data = (X[:9], Y[:9])
    history = model.fit(
        X, Y, epochs=epochs, validation_data=data, callbacks=list(used), **FIT
    )
    return model, history.history


@pytest.mark.slow
def test_by_batch() -> None:
    def program(world: World) -> Any:
        seen: list[Any] = []

        def note(batch: int, logs: Any) -> None:
            seen.append((batch, dict(sorted(logs.items()))))

        _fit(
            world,
            callbacks.LambdaCallback(on_train_batch_end=note, on_epoch_end=note),
            epochs=2,
        )
        return seen

    check(program, [2])


@pytest.mark.slow
def test_learning_rates() -> None:
    def program(world: World) -> Any:
        rates = callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        plateau = callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=100.0)
        model, history = _fit(world, rates, plateau)
        return history, model.optimizer.learning_rate, model.get_weights()

    check(program, [2])


def test_early_stopping_restores_weights() -> None:
    def program(world: World) -> Any:
        stop = callbacks.EarlyStopping(
            "val_loss", patience=1, mode="max", restore_best_weights=True
        )
        model, history = _fit(world, stop, epochs=5)
        assert len(history["loss"]) < 5
        return history, model.get_weights(), model.evaluate(X, Y, verbose=0)

    check(program, [2])


@pytest.mark.slow
def test_checkpoints(tmp_path: pathlib.Path) -> None:
    def program(world: World) -> Any:
        path = tmp_path / f"{bool(world.repl)}.keras"
        best = callbacks.ModelCheckpoint(path, "val_loss", save_best_only=True)
        _fit(world, best)
        return keras.saving.load_model(path).get_weights()

    check(program, [2])


class _Interrupted(Exception):
    pass


@pytest.mark.slow
def test_a_backup_resumes_to_the_same_losses(tmp_path: pathlib.Path) -> None:
    def program(world: World) -> Any:
        folder = tmp_path / f"{world.repl and world.repl.num_replicas}"

        def interrupt(epoch: int, logs: Any) -> None:
            if epoch == 1:
                raise _Interrupted

        backup = callbacks.BackupAndRestore(folder)
        try:
            _fit(world, callbacks.LambdaCallback(on_epoch_begin=interrupt), backup)
        except _Interrupted:
            pass
        model, history = _fit(world, callbacks.BackupAndRestore(folder))
        return history, model.get_weights()

    def straight(world: World) -> Any:
        model, history = _fit(world)
        return {name: values[1:] for name, values in history.items()}, (
            model.get_weights()
        )

    expected = worlds.outcome(straight, 0)
    for num_replicas in 0, 2:
        pairs = zip(
            tf.nest.flatten(worlds.outcome(program, num_replicas)),
            tf.nest.flatten(expected),
            strict=True,
        )
        for own, plain in pairs:
            np.testing.assert_allclose(own, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_nan_ends_training() -> None:
    def program(world: World) -> Any:
        model = world.made(classifier)
        x = X.copy()
        x[8, 0] = np.nan  # on one of the replicas
        history = model.fit(
            x, Y, epochs=3, callbacks=[callbacks.TerminateOnNaN()], **FIT
        )
        return len(history.history["loss"]), model.stop_training

    check(program, [2])


@pytest.mark.slow
def test_logs_on_disk(tmp_path: pathlib.Path) -> None:
    def program(world: World) -> Any:
        folder = tmp_path / f"{world.repl and world.repl.num_replicas}"
        folder.mkdir()
        _fit(
            world,
            callbacks.CSVLogger(folder / "log.csv"),
            callbacks.TensorBoard(folder / "board", update_freq=1),
        )
        with open(folder / "log.csv") as file:
            rows = [
                {k: float(v) for k, v in row.items()} for row in csv.DictReader(file)
            ]
        scalars = {}
        for path in sorted((folder / "board").rglob("events*")):
            for event in tf.compat.v1.train.summary_iterator(str(path)):
                for value in event.summary.value:
                    if value.tag.startswith(("epoch_loss", "batch_loss", "evaluation")):
                        key = (path.parent.name, value.tag, event.step)
                        scalars[str(key)] = tf.make_ndarray(value.tensor)
        assert len(scalars) > 6
        return rows, scalars

    check(program, [2])
