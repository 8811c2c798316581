# SPDX-License-Identifier: Apache-2.0
"""examples/digits.py, run as a user runs it: in a process of its own."""

import shlex
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import forks
from tests.examples import programs
from tests.examples.programs import history

_COMMAND = [sys.executable, str(programs.EXAMPLES / "digits.py")]


def run_well(*flags):
    return programs.call_well("digits", *flags)


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


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--optimizer=sgd", "the run began with --optimizer=adam, not sgd"),
        ("--epochs=1", "--epochs=1, but the run has been trained for 2 epochs"),
    ],
)
def test_a_run_is_not_resumed_with_other_settings(finished, flag, said):
    ended = programs.call("digits", f"--output_dir={finished[0]}", "--resume", flag)
    programs.assert_refused(ended, "digits", said)


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
        env=programs.ENVIRONMENT,
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
        env=programs.ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=programs.as_in_a_terminal,
    )


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
