# SPDX-License-Identifier: Apache-2.0
"""examples/keras_fit.py, run as a user runs it: in a process of its own."""

import csv
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tests.examples import programs

pytest.importorskip("mlxtend")

_COMMAND = [sys.executable, str(programs.EXAMPLES / "keras_fit.py")]


def rows(folder):
    """Returns the numbers of each epoch."""
    with open(folder / "history.csv") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of three epochs."""
    folder = tmp_path_factory.mktemp("finished")
    flags = ("--epochs=3", "--batch_size=256")
    printed = programs.call_well("keras_fit", f"--output_dir={folder}", *flags)
    assert f"Results are in {folder}" in printed
    return folder


@pytest.mark.slow
def test_a_run_learns_and_leaves_a_model_and_curves(finished):
    history = rows(finished)
    assert [row["epoch"] for row in history] == [0, 1, 2]
    assert history[-1]["val_accuracy"] > 0.8
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    model = keras.saving.load_model(finished / "model.keras")
    assert model.predict(np.zeros([2, 28, 28, 1]), verbose=0).shape == (2, 10)


@pytest.mark.slow
def test_a_run_that_is_resumed_reaches_the_same_losses(finished, tmp_path):
    folder = tmp_path / "stopped"
    flags = [f"--output_dir={folder}", "--epochs=3", "--batch_size=256"]
    process = subprocess.Popen([*_COMMAND, *flags], env=programs.ENVIRONMENT)
    while not (folder / "history.csv").exists() or not rows(folder):
        assert process.poll() is None
        time.sleep(0.05)
    while not (folder / "backup").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    programs.call_well("keras_fit", *flags, "--resume")
    for resumed, straight in zip(rows(folder), rows(finished), strict=True):
        np.testing.assert_allclose(
            list(resumed.values()), list(straight.values()), rtol=1e-5
        )
