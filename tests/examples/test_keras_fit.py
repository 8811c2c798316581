# SPDX-License-Identifier: Apache-2.0
"""examples/keras_fit.py, run as a user runs it: in a process of its own."""

import csv
import os
import pathlib
import signal
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

from tests import forks

pytest.importorskip("mlxtend")

_ROOT = pathlib.Path(__file__).parents[2]
_COMMAND = [sys.executable, str(_ROOT / "examples" / "keras_fit.py")]
_PATH = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
_ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")},
    "PYTHONPATH": _PATH,
    "PYTHONUNBUFFERED": "1",
}


def run(*flags):
    """Runs the example to its end."""
    return forks.run([*_COMMAND[1:], *flags], _ENVIRONMENT)


def rows(folder):
    """Returns the numbers of each epoch."""
    with open(folder / "history.csv") as file:
        return [{k: float(v) for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of three epochs."""
    folder = tmp_path_factory.mktemp("finished")
    result = run(f"--output_dir={folder}", "--epochs=3", "--batch_size=256")
    assert result.returncode == 0, result.stderr
    assert f"Results are in {folder}" in result.stdout
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
    process = subprocess.Popen([*_COMMAND, *flags], env=_ENVIRONMENT)
    while not (folder / "history.csv").exists() or not rows(folder):
        assert process.poll() is None
        time.sleep(0.05)
    while not (folder / "backup").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    result = run(*flags, "--resume")
    assert result.returncode == 0, result.stderr
    for resumed, straight in zip(rows(folder), rows(finished), strict=True):
        np.testing.assert_allclose(
            list(resumed.values()), list(straight.values()), rtol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, said",
    [
        (["--epochs=0"], "--epochs"),
        (["--batch_size=99999999999999999999"], "is not an integer in the range"),
        (["--learning_rate=nan"], "must be a positive number"),
        (["--devices=CPU:0,CPU:0"], "CPU:0"),
        (["--devices=TPU:7"], "TPU:7"),
        (["more"], "unexpected argument 'more'"),
        (["--resume"], "there is no interrupted run"),
        (["--output_dir=/proc/none"], "is not writable"),
    ],
)
def test_mistakes_are_told_in_one_line(flags, said, tmp_path):
    given = [f"--output_dir={tmp_path}", *flags]
    result = run(*given)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if "keras_fit.py" in line]
    assert len(errors) == 1 and said in errors[0]
    assert "Traceback" not in result.stderr
