# SPDX-License-Identifier: Apache-2.0
"""examples/resnet.py: the numbers of one device, resumed runs, mistakes."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.examples import programs

pytest.importorskip("mlxtend")
support = programs.support()
example = programs.load("resnet")

# Four steps of an epoch, which use the same images for any number of replicas.
SMALL = ("--global_batch_size=1000", "--width=2", "--blocks=1", "--learning_rate=0.05")


def train(folder: pathlib.Path, *flags: str) -> str:
    return programs.call_well("resnet", f"--output_dir={folder}", *SMALL, *flags)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """The folder of a run of two epochs on two replicas, and its output."""
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


@pytest.mark.slow
def test_one_replica_reaches_the_same_losses(
    finished: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    train(tmp_path, "--epochs=2", "--devices=CPU:0")
    actual, expected = programs.history(tmp_path), programs.history(finished[0])
    np.testing.assert_allclose(actual["loss"], expected["loss"], rtol=5e-5)
    np.testing.assert_allclose(actual["accuracy"], expected["accuracy"], atol=2.1e-3)


def few_steps(replicas: int) -> tuple[list[float], list[np.ndarray]]:
    """Returns the losses of steps on 16 images, and all variables after them."""
    repl = helpers.make(replicas)
    tf.keras.utils.set_random_seed(0)
    with repl.context():
        model = example.make_model(width=2, blocks=1)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1, 0.9))
    train, _ = support.mnist()
    step = repl.build(
        example.make_step(repl, model, optimizer),
        support.shuffled_input((train.images, train.labels), 16, seed=1),
    )
    losses = [float(step()[0]) for _ in range(3)]
    return losses, [variable.numpy() for variable in model.variables]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, 4])
def test_four_images_on_each_replica_train_as_sixteen_on_one(replicas: int) -> None:
    losses, variables = few_steps(replicas)
    expected_losses, expected = few_steps(1)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for actual, value in zip(variables, expected, strict=True):
        np.testing.assert_allclose(actual, value, atol=1e-4)
