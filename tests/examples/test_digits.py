# SPDX-License-Identifier: Apache-2.0
"""examples/digits.py, run as a user runs it: in a process of its own."""

import json
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import forks

_ROOT = pathlib.Path(__file__).parents[2]
_COMMAND = [sys.executable, str(_ROOT / "examples" / "digits.py")]
_ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")},
    "PYTHONPATH": str(_ROOT),
    "PYTHONUNBUFFERED": "1",  # lines are read as they are printed
}


def run(*flags):
    """Runs the example to its end."""
    return forks.run([*_COMMAND[1:], *flags], _ENVIRONMENT)


def run_well(*flags):
    """Runs the example, which must succeed; returns its output."""
    result = run(*flags)
    assert result.returncode == 0, result.stderr
    return result.stdout


def history(folder):
    return json.loads((folder / "history.json").read_text())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two epochs, and its output."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, run_well(f"--output_dir={folder}", "--epochs=2")


def test_a_run_tells_of_each_epoch_and_lowers_the_loss(finished):
    folder, printed = finished
    assert "epoch 1/2" in printed
    assert "epoch 2/2" in printed
    assert f"Results are in {folder}" in printed
    losses = history(folder)["loss"]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


def test_a_run_leaves_checkpoint_summaries_and_curves(finished):
    folder, _ = finished
    names = sorted(p.name for p in (folder / "checkpoints").iterdir())
    assert "checkpoint" in names
    assert "ckpt-44.index" in names  # 2 epochs of 1437 // 64 = 22 steps
    assert list((folder / "summaries").glob("events.out.tfevents.*"))
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_every_test_image_counts_once(finished):
    """360 images in batches of 64: 5 whole ones and 40 more."""
    folder, _ = finished
    for accuracy in history(folder)["accuracy"]:
        assert accuracy * 360 == pytest.approx(round(accuracy * 360), abs=1e-6)


@pytest.mark.slow
@pytest.mark.gate
def test_the_default_run_is_right_about_97_of_100_images(tmp_path):
    run_well(f"--output_dir={tmp_path}")
    assert history(tmp_path)["accuracy"][-1] >= 0.97


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--global_batch_size=63"], "63 examples cannot be divided evenly among 2"),
        pytest.param(
            ["--global_batch_size=2000"],
            "more than the 1437 training images",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--global_batch_size=0"],
            "--global_batch_size=0: 0 is not an integer in the range",
            marks=pytest.mark.slow,
        ),
        (["--devices=CPU:0,GPU:99"], "GPU:99 does not exist"),
        pytest.param(
            ["--optimizer=sgdd"],
            "--optimizer=sgdd: value should be one of <adam|",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--learning_rate=-1"],
            "--learning_rate=-1.0: must be a positive number",
            marks=pytest.mark.slow,
        ),
        (["--output_dir=/dev/null/here"], "/dev/null/here is not writable"),
        (["--output_dir="], "--output_dir=: must name a folder"),
        (["--resume"], "--resume: there is no checkpoint in "),
        (["extra"], "unexpected argument 'extra'"),
    ],
    ids=lambda value: value[0].lstrip("-") if isinstance(value, list) else "",
)
def test_a_mistake_ends_with_one_line_and_status_2(flags, said, tmp_path):
    result = run(f"--output_dir={tmp_path / 'new'}", *flags)
    assert_refused(result, said)


def test_a_run_is_not_resumed_with_other_settings(finished):
    folder, _ = finished
    result = run(f"--output_dir={folder}", "--resume", "--optimizer=sgd")
    assert_refused(result, "the run began with --optimizer=adam, not sgd")


def test_a_run_is_not_resumed_for_fewer_epochs(finished):
    folder, _ = finished
    result = run(f"--output_dir={folder}", "--resume", "--epochs=1")
    assert_refused(result, "--epochs=1, but the run has been trained for 2 epochs")


# --- Runs that are stopped, killed, or out of disk space -----------------------------


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_a_checkpoint(signum, tmp_path):
    interrupt_after_an_epoch(f"--output_dir={tmp_path}", "--epochs=1000", signum=signum)
    steps = len(history(tmp_path)["loss"])
    assert (tmp_path / "checkpoints" / f"ckpt-{steps}.index").exists()


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_gets_to_its_end(tmp_path):
    """Each time after an epoch and a moment, in which it saves, deletes or trains."""
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    steps = []
    for turn in range(6):
        flags = [f"--output_dir={broken}", "--epochs=1000"]
        process = start(*flags, *(["--resume"] if turn else []))
        for line in process.stdout:
            if "epoch " in line:
                break
        time.sleep(turn / 20)
        process.kill()
        process.communicate()
        names = (broken / "checkpoints").glob("ckpt-*.index")
        steps.append(max(int(path.stem[5:]) for path in names))
    assert steps == sorted(set(steps))
    epochs = steps[-1] // 22 + 1
    run_well(f"--output_dir={broken}", f"--epochs={epochs}", "--resume")
    run_well(f"--output_dir={whole}", f"--epochs={epochs}")
    assert history(broken) == history(whole)


@pytest.mark.slow
def test_a_full_disk_ends_with_one_line_and_leaves_what_was_saved(finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    limit = [f"ulimit -f 100 && exec {shlex.join(_COMMAND)} $0 $@"]
    result = subprocess.run(
        ["bash", "-c", *limit, f"--output_dir={folder}", "--resume", "--epochs=3"],
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    lines = forks.own_lines(result.stderr)
    (line,) = [line for line in lines if "error" in line]
    assert line.startswith("digits.py: error: stopped, continue with --resume: ")
    assert "File too large" in line
    assert "Traceback" not in result.stderr
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before


def assert_refused(result, said):
    assert result.returncode == 2
    (line,) = forks.own_lines(result.stderr)
    assert line.startswith("digits.py: error: ")
    assert said in line


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(tmp_path):
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    interrupt_after_an_epoch(f"--output_dir={broken}", "--epochs=1000")
    steps = len(history(broken)["loss"])
    epochs = steps // 22 + 2
    run_well(f"--output_dir={broken}", f"--epochs={epochs}", "--resume")
    run_well(f"--output_dir={whole}", f"--epochs={epochs}")

    assert 22 <= steps < 22 * epochs
    assert history(broken) == history(whole)


def start(*flags):
    """Starts the example."""
    return subprocess.Popen(
        [*_COMMAND, *flags],
        env=_ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=_as_in_a_terminal,
    )


def _as_in_a_terminal():
    """Makes signals stop a program, which nohup and background shells prevent."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)


def interrupt_after_an_epoch(*flags, signum=signal.SIGINT):
    """Runs the example until it reports its first epoch, then sends a signal."""
    with start(*flags) as process:
        for line in process.stdout:
            if "epoch " in line:
                process.send_signal(signum)
                break
        printed = process.stdout.read()
    assert process.returncode == 128 + signum
    assert "continue with --resume" in printed


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_replicas(finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    before = history(folder)["loss"]
    four = "--devices=CPU:0,CPU:1,CPU:2,CPU:3"
    run_well(f"--output_dir={folder}", "--epochs=4", "--resume", four)

    after = history(folder)["loss"]
    assert after[:44] == before
    assert len(after) == 88
    assert np.mean(after[44:]) < np.mean(before[-22:])
