# SPDX-License-Identifier: Apache-2.0
"""examples/language_model.py: the numbers of one device, causality, perplexity."""

from __future__ import annotations

import math
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.examples import programs

support = programs.support()
example = programs.load("language_model")

CONTEXT = 12
SMALL = ("--global_batch_size=64", f"--context={CONTEXT}", "--width=8", "--depth=1")


# --- On replicas ----------------------------------------------------------------------


def few_steps(replicas: int) -> tuple[list[float], float]:
    """Returns the losses of three steps, and the perplexity after them."""
    repl = helpers.make(replicas)
    keras.utils.set_random_seed(0)
    with repl.context():
        model = example.make_model(CONTEXT, width=8, depth=1)
        optimizer = repl.wrap_optimizer(example.make_optimizer(0.01, 10))
    train, held_out = example.load_windows(CONTEXT)
    train_fn, eval_fn = example.make_steps(repl, model, optimizer)
    step = repl.build(train_fn, support.shuffled_input((train,), 8, seed=1))
    losses = [float(step()[0]) for _ in range(3)]
    eval_step = repl.build(eval_fn, support.single_pass_input((held_out[:13],), 8))
    actual = example.perplexity(eval_step, 2)
    logits = model(held_out[:13, :-1].astype(np.int32), training=False)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(
        held_out[:13, 1:].astype(np.int32), logits
    )
    assert actual == pytest.approx(math.exp(np.mean(each)), rel=1e-5)
    return losses, actual


@pytest.mark.slow
def test_two_replicas_train_as_one_does() -> None:
    losses, perplexity = few_steps(2)
    expected, perplexity_of_one = few_steps(1)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    assert perplexity == pytest.approx(perplexity_of_one, rel=1e-4)


# --- The data -------------------------------------------------------------------------


def test_windows_hold_each_byte_but_the_first_once_as_what_is_predicted() -> None:
    actual = example.windows(["abcdef", "ghij"], 3)
    assert [bytes(window) for window in actual] == [b"abcd", b"def\n", b"\nghi"]
    assert example.windows(["abc"], 3).shape == (0, 4)


def test_no_text_is_both_trained_with_and_held_out() -> None:
    train, held_out = example.load_windows(CONTEXT)
    assert len(held_out) == example.HELD_OUT_WINDOWS
    text = bytes(train[:, :-1])
    files = [support.library_text(path).encode() for path in support.library_files()]
    seen = []
    for index, file in enumerate(files[:40]):
        part = file[200:300]
        if part and sum(part in other for other in files) == 1:
            assert (part in text) == (index % example.HELD_OUT != 0)
            seen.append(part in text)
    assert set(seen) == {True, False}


# --- The model ------------------------------------------------------------------------


def test_a_byte_is_predicted_from_those_before_it_alone() -> None:
    keras.utils.set_random_seed(0)
    model = example.make_model(CONTEXT, width=8, depth=2)
    random = np.random.default_rng(0)
    window = random.integers(0, 256, [1, CONTEXT]).astype(np.int32)
    before = model(window).numpy()
    for place in range(CONTEXT):
        changed = window.copy()
        changed[0, place] ^= 0x55
        logits = model(changed).numpy()
        np.testing.assert_array_equal(logits[:, :place], before[:, :place])
        assert np.abs(logits - before)[0, place:].max(-1).min() > 0


def test_a_sample_follows_the_model() -> None:
    class Next:
        """Is certain that each byte is one more than the last one."""

        input_shape = (None, 4)

        def __call__(self, window: tf.Tensor, training: bool) -> tf.Tensor:
            assert not training and window.shape == (1, 4)
            return 1e4 * tf.one_hot(window + 1, 256)

    assert example.continued(Next(), "ab", 5, 1.0, 1) == "abcdefg"
    keras.utils.set_random_seed(0)
    model = example.make_model(4, width=8, depth=1)
    texts = [example.continued(model, "ab", 9, 1.0, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


# --- The program ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """The folder of a run of twenty steps, and its output."""
    folder = tmp_path_factory.mktemp("finished")
    flags = ("--steps=20", "--prompt=def é", "--sample_bytes=20", *SMALL)
    return folder, programs.call_well(
        "language_model", f"--output_dir={folder}", *flags
    )


def test_a_run_tells_of_perplexity_and_leaves_a_sample(
    finished: tuple[pathlib.Path, str],
) -> None:
    folder, printed = finished
    logged = programs.history(folder)
    assert logged["steps"]["perplexity"] == list(range(2, 21, 2))
    last = logged["perplexity"][-1]
    assert "step 20/20" in printed and f"Perplexity {last:.3f} per byte" in printed
    assert 1 < last < logged["perplexity"][0] < 300
    sample = (folder / "sample.txt").read_text()
    assert sample.startswith("def é") and sample in printed
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_hundred_steps_predict_better_than_the_frequencies_of_bytes(
    tmp_path: pathlib.Path,
) -> None:
    flags = ("--steps=100", "--width=32", "--depth=1", "--sample_bytes=50")
    ended = programs.run("language_model", f"--output_dir={tmp_path}", *flags)
    assert ended.status == 0, ended.stderr
    train, held_out = example.load_windows(96)
    shares = np.bincount(train[:, 1:].ravel(), minlength=256) + 1.0
    by_frequency = -np.log(shares / shares.sum())[held_out[:, 1:]].mean()
    assert programs.history(tmp_path)["perplexity"][-1] < 0.8 * math.exp(by_frequency)
