# SPDX-License-Identifier: Apache-2.0
"""examples/gan.py: the numbers of one device, equal vectors, singular values."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from matplotlib import image
from sklearn import linear_model

from tests import helpers
from tests.examples import programs

pytest.importorskip("mlxtend")
support = programs.support()
example = programs.load("gan")

SIZE, NOISE = 8, 4
SMALL = (f"--global_batch_size={SIZE}", f"--noise={NOISE}", "--channels=2")


# --- On replicas ----------------------------------------------------------------------


@functools.cache
def few_steps(replicas: int) -> tuple[Any, list[float], np.ndarray]:
    """Returns a GAN after three steps, its losses, and samples."""
    repl = helpers.make(replicas)
    tf.keras.utils.set_random_seed(0)
    gan = example.Gan.make(repl, channels=2, noise=NOISE, rates=(2e-4, 4e-4))
    images = support.mnist(held_out=0)[0].images
    steps = (
        repl.build(
            gan.discriminator_step,
            example.discriminator_input(images, SIZE, NOISE, seed=1, first_step=0),
        ),
        repl.build(
            gan.generator_step,
            example.noise_input(SIZE, NOISE, seed=1, who=example.GENERATOR),
        ),
    )
    losses = [float(step()[0]) for _ in range(3) for step in steps]
    noise = example.noise_of([6, NOISE], 1, example.SAMPLES, 0)
    return gan, losses, gan.samples(noise)


@pytest.mark.slow
def test_two_replicas_train_both_networks_as_one_does() -> None:
    gan, losses, samples = few_steps(2)
    plain, expected, images = few_steps(1)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(samples, images, atol=1e-4)
    for own, other in zip(spectral(gan), spectral(plain), strict=True):
        np.testing.assert_allclose(own.u.numpy(), other.u.numpy(), atol=1e-4)


@pytest.mark.slow
def test_vectors_and_moving_statistics_are_the_same_bits_on_all_replicas() -> None:
    gan, _, _ = few_steps(2)
    state = [*gan.generator.non_trainable_variables, *(s.u for s in spectral(gan))]
    assert len(state) == 6 + 4
    for variable in state:
        components = [one.numpy().tobytes() for one in variable.value.components]
        assert len(components) == 2
        assert len(set(components)) == 1


def spectral(gan: Any) -> list[Any]:
    """Returns the discriminator's normalized layers."""
    return [one for one in gan.discriminator.layers if hasattr(one, "u")]


# --- Spectral normalization -----------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 3, 4, 5), (7, 1)])
def test_the_estimate_becomes_the_largest_singular_value(
    shape: tuple[int, ...],
) -> None:
    random = np.random.default_rng(1)
    kernel = tf.constant(random.normal(size=shape))
    u = tf.constant(random.normal(size=shape[-1]))
    for _ in range(200):
        value, u = example.largest_singular_value(kernel, u)
    expected = np.linalg.svd(tf.reshape(kernel, [-1, shape[-1]]))[1][0]
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_its_gradient_is_that_of_the_singular_value() -> None:
    kernel = np.random.default_rng(2).normal(size=[6, 3])
    left, _, right = np.linalg.svd(kernel)
    with tf.GradientTape() as tape:
        matrix = tf.constant(kernel)
        tape.watch(matrix)
        value, _ = example.largest_singular_value(matrix, tf.constant(right[0]))
    expected = np.outer(left[:, 0], right[0])
    np.testing.assert_allclose(tape.gradient(value, matrix), expected, atol=1e-9)


@pytest.mark.parametrize("size", [3, None])
def test_a_layer_in_training_comes_to_divide_by_it(size: int | None) -> None:
    repl = helpers.make(2)
    with repl.context():
        layer = example.SpectralNorm(4, size)
        layer.build((None, 5, 5, 2) if size else (None, 6))
    inputs = np.ones([1, 5, 5, 2] if size else [1, 6], np.float32)
    before = layer.u.numpy()
    repl.run(lambda: layer(inputs))
    np.testing.assert_array_equal(layer.u.numpy(), before)
    step = repl.build(lambda: layer(inputs, training=True))
    for _ in range(200):  # singular values drawn at random may lie close together
        outputs = step()
    matrix = layer.kernel.numpy().reshape(-1, 4)
    kernel = layer.kernel.numpy() / np.linalg.svd(matrix)[1][0]
    expected = tf.nn.conv2d(inputs, kernel, 1, "SAME") if size else inputs @ kernel
    np.testing.assert_allclose(outputs[0], expected, atol=1e-4)


# --- Inputs ---------------------------------------------------------------------------


def noise_in(replicas: int, step: int) -> list[list[float]]:
    """Returns the rows of noise in a step, over all replicas."""
    input_fn = example.noise_input(8, 3, seed=1, who=example.GENERATOR, first_step=step)
    contexts = (
        helpers.replicator.InputContext(r, replicas, r, replicas)
        for r in range(replicas)
    )
    parts = [next(iter(input_fn(context))).numpy() for context in contexts]
    return sorted(np.concatenate(parts).tolist())


def test_noise_depends_on_the_step_and_not_on_how_many_replicas_there_are() -> None:
    assert noise_in(1, 5) == noise_in(2, 5) == noise_in(4, 5)
    assert noise_in(1, 5) != noise_in(1, 6)
    draws = [
        example.noise_of([2], seed, who, step).numpy().tolist()
        for seed in (1, 2)
        for who in range(3)
        for step in range(3)
    ]
    assert len({number for draw in draws for number in draw}) == 2 * len(draws)


# --- The program ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("finished")
    programs.call_well("gan", f"--output_dir={folder}", "--steps=20", *SMALL)
    return folder


def test_a_run_leaves_losses_and_samples(finished: pathlib.Path) -> None:
    logged = programs.history(finished)
    assert len(logged["discriminator"]) == len(logged["generator"]) == 20
    names = sorted(path.name for path in (finished / "samples").iterdir())
    assert names == [f"step-{step:07}.png" for step in range(2, 21, 2)]
    grid = image.imread(finished / "samples.png")
    assert grid.shape == (2 * 28 * example.ROWS, 2 * 28 * example.COLUMNS, 4)
    assert grid[..., :3].std() > 0.01
    assert (finished / "curves.png").exists()


@pytest.mark.slow
def test_samples_come_to_look_like_digits_of_all_kinds(tmp_path: pathlib.Path) -> None:
    """To a classifier of real digits, each sample looks like one, and all like many."""
    ended = programs.run("gan", f"--output_dir={tmp_path}", "--steps=800")
    assert ended.status == 0, ended.stderr
    train, _ = support.mnist()
    classifier = linear_model.LogisticRegression(C=0.05, max_iter=200)
    classifier.fit(train.images.reshape(-1, 784), train.labels)

    def score(name: str) -> float:
        """Returns the inception score, with that classifier: 1 to 10."""
        grid = image.imread(tmp_path / name)[::2, ::2, 0]
        cut = grid.reshape(example.ROWS, 28, example.COLUMNS, 28)
        chances = classifier.predict_proba(cut.swapaxes(1, 2).reshape(-1, 784))
        ratios = np.log(chances / chances.mean(0))
        return float(np.exp(np.mean(np.sum(chances * ratios, 1))))

    first, last = score("samples/step-0000080.png"), score("samples.png")
    assert last > max(3.0, 1.3 * first), (first, last)
