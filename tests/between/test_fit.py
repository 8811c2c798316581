# SPDX-License-Identifier: Apache-2.0
"""Keras' fit in between-graph mode computes plain Keras' numbers, on all hosts."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests.between import fitting, launched, processes
from tests.keras import test_programs, worlds
from tests.launch.stub import Place


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("vae", "tabular"), tuple(p.__name__ for p in test_programs.PROGRAMS)],
    ids=["two", "all"],
)
def test_programs_of_keras(tmp_path: pathlib.Path, names: tuple[str, ...]) -> None:
    processes.run("fits", [1, 2], str(tmp_path), *names)
    actual = [pickle.loads((tmp_path / str(host)).read_bytes()) for host in (0, 1)]
    for name in names:
        expected = worlds.outcome(getattr(test_programs, name), 0)
        for results in actual:
            tf.nest.map_structure(
                lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
                tuple(results[name]),
                expected,
            )


@pytest.mark.slow
def test_a_fit_goes_on_after_a_host_was_killed(place: Place) -> None:
    def trained(moment: str, which: int) -> list[launched.Life]:
        folder = place.folder / f"{moment}-{which}"
        restarts = int(moment != "never")
        stdout, _ = launched.run(
            *(place, "tests.between.fitting", moment, which, folder), restarts=restarts
        )
        all_lives = launched.lives(stdout)
        assert len(all_lives) == 1 + restarts
        return all_lives

    (plain,) = trained("never", 0)
    assert {k for _, k in plain.losses} == {*range(fitting.EPOCHS)}
    assert len({*plain.losses.values()}) == fitting.EPOCHS  # equal on both hosts
    for moment, which in [("batch", 0), ("batch", 1), ("save", 0), ("save", 1)]:
        first, second = trained(moment, which)
        saved = fitting.KILLED_IN
        assert second.begun in ([saved] * 2, [saved + 1] * 2)
        for life in (first, second):
            assert life.losses.items() <= plain.losses.items()
        assert first.losses.keys() | second.losses.keys() == plain.losses.keys()


def backs_up(cluster: Any) -> str:
    """Returns the error of a fit with BackupAndRestore."""
    repl = replicator.Replicator(cluster.devices)
    keras.utils.set_random_seed(1)
    with repl.context():
        model = worlds.classifier()
    repl.keras_model(model)
    backup = keras.callbacks.BackupAndRestore("nowhere")
    x, y = worlds.numbers(0, 8, 8), worlds.labels(0, 8)
    for callbacks in ([backup], backup, keras.callbacks.CallbackList([backup])):
        try:
            model.fit(x, y, verbose=0, callbacks=callbacks)
        except replicator.ContextError as error:
            message = str(error)
        else:
            return "it was not refused"
    model.fit(x, y, 8, 1, 0, [])  # nothing has been changed
    return message


@pytest.mark.slow
def test_backups_of_keras_are_refused() -> None:
    for text in processes.run("test_fit.backs_up", [1, 1]):
        assert text.startswith("fit was given BackupAndRestore in between-graph mode")
        assert "tests/between/test_fit.py:" in text
        assert "cluster.checkpoint(folder, model=model)" in text
