# SPDX-License-Identifier: Apache-2.0
"""What all examples do: mistakes are one line, resumed runs go on, and all learn."""

from __future__ import annotations

import pathlib
import shutil

import numpy as np
import pytest

from tests.examples import programs

_NO_GPU = ("--devices=CPU:0,GPU:99", "GPU:99 does not exist")
_NOT_EVEN = ("--global_batch_size=63", "63 examples cannot be divided evenly among 2")
_NO_CHECKPOINT = ("--resume", "--resume: there is no checkpoint in ")
_EXTRA = ("extra", "unexpected argument 'extra'")
# The program, its flags, and what it says of them.
_MISTAKES = [
    ("digits", *_NOT_EVEN),
    ("digits", "--global_batch_size=2000", "more than the 1437 training images"),
    ("digits", "--global_batch_size=0", "_size=0: 0 is not an integer in the range"),
    ("digits", *_NO_GPU),
    ("digits", "--optimizer=sgdd", "=sgdd: value should be one of <adam|"),
    ("digits", "--learning_rate=-1", "rate=-1.0: must be a positive number"),
    ("digits", "--output_dir=/dev/null/here", "/dev/null/here is not writable"),
    ("digits", "--output_dir=", "--output_dir=: must name a folder"),
    ("digits", *_NO_CHECKPOINT),
    ("digits", *_EXTRA),
    ("evolution", "--environment=CartPole-v9", "--environment=CartPole-v9: "),
    ("evolution", "--environment=nothing/Here-v0", "--environment=nothing/Here-v0: "),
    ("evolution", "--environment=Blackjack-v1", "v1 has observations Tuple("),
    ("evolution", "--pairs=31", "=31 cannot be divided evenly among 2 replicas"),
    ("evolution", "--noise=-1", "--noise=-1.0: must be a positive number"),
    ("evolution", *_NO_GPU),
    ("evolution", *_NO_CHECKPOINT),
    ("gan", *_NOT_EVEN),
    ("gan", "--global_batch_size=6000", "more than the 5000 training examples"),
    ("gan", "--generator_rate=0", "must be a positive number"),
    ("gan", "--noise=0", "--noise=0: 0 is not an integer in the range"),
    ("gan", "--devices=CPU:0,CPU:0", "CPU:0"),
    ("gan", *_NO_CHECKPOINT),
    ("gan", *_EXTRA),
    ("global_batch_norm", *_NO_GPU),
    ("global_batch_norm", "--learning_rate=0", "=0.0: must be a positive number"),
    ("global_batch_norm", "--offset=inf", "--offset=inf: must be a finite number"),
    ("global_batch_norm", "--global_batch_size=999998", "999998 is more than the"),
    ("global_batch_norm", *_EXTRA),
    ("hosts", "--epochs=0", "--epochs=0: 0 is not an integer in the range"),
    ("hosts", "--learning_rate=nan", "=nan: must be a positive number"),
    ("hosts", "--output_dir=/dev/null/here", "/dev/null/here is not writable"),
    ("hosts", "--seed=1", "connect found no description of hosts. Fix: "),
    ("hosts", *_NO_CHECKPOINT),
    ("hosts", *_EXTRA),
    ("keras_fit", "--batch_size=99999999999999999999", "is not an integer in the ran"),
    ("keras_fit", "--learning_rate=nan", "must be a positive number"),
    ("keras_fit", "--devices=CPU:0,CPU:0", "CPU:0"),
    ("keras_fit", "--resume", "there is no interrupted run"),
    ("keras_fit", "--output_dir=/proc/none", "is not writable"),
    ("keras_fit", *_EXTRA),
    ("language_model", *_NOT_EVEN),
    ("language_model", "--global_batch_size=9999998", "windows of text"),
    ("language_model", "--context=1", "=1: 1 is not an integer in the range"),
    ("language_model", "--width=6", "--width=6: must be a multiple of the 4 heads"),
    ("language_model", "--prompt=", "must not be empty"),
    ("language_model", "--temperature=0", "0.0 is not a number in the range"),
    ("language_model", "--learning_rate=inf", "must be a positive number"),
    ("language_model", *_NO_CHECKPOINT),
    ("language_model", *_EXTRA),
    ("learner", "--environment=CartPole-v9", "--environment=CartPole-v9: "),
    ("learner", "--environment=Pendulum-v1", "expected a Box of observations"),
    ("learner", "--batch_size=15", "15 examples cannot be divided evenly among 2"),
    ("learner", "--discount=1.5", "--discount=1.5: 1.5 is not"),
    ("learner", "--actors=0", "--actors=0: 0 is not"),
    ("learner", *_NO_GPU),
    ("learner", *_NO_CHECKPOINT),
    ("pipeline", "--global_batch_size=62", "=62 cannot be cut into 4 micro-batches"),
    ("pipeline", "--micro_batches=0", "=0: 0 is not an integer in the range"),
    ("pipeline", "--pipelines=2 --devices=CPU:0,CPU:1,CPU:2", "=2 on 3 devices"),
    ("pipeline", "--devices=CPU:0,CPU:1,CPU:2,CPU:3,CPU:4", "each must have the same"),
    ("pipeline", *_NO_GPU),
    ("pipeline", "--global_batch_size=4000", "more than the 1437 training examples"),
    ("pipeline", "--mode=both", "should be one of <messages|devices>"),
    ("resnet", *_NOT_EVEN),
    ("resnet", "--global_batch_size=4002", "more than the 4000 training examples"),
    ("resnet", "--learning_rate=nan", "must be a positive number"),
    ("resnet", "--width=0", "--width=0: 0 is not an integer in the range"),
    ("resnet", *_NO_GPU),
    ("resnet", *_NO_CHECKPOINT),
    ("strategies", "--steps=1", "--steps"),
    ("strategies", "--learning_rate=nan", "must be a positive number"),
    ("strategies", "--devices=TPU:7 --batch_size=1", "TPU:7"),
    ("strategies", "--strategies=ps,none", "=ps,none: expected some of mirrored, ps"),
    ("strategies", "--strategies=", "expected some of mirrored"),
    ("strategies", "--batch_size=63", "does not divide evenly by 2 replicas"),
    ("strategies", *_EXTRA),
    ("tensor_parallel", "--devices=CPU:0,CPU:1,CPU:2", "8 heads cannot be divided"),
    ("tensor_parallel", *_NO_GPU),
    ("tensor_parallel", "--batch_size=4000", "more than the 1437 training examples"),
    ("tensor_parallel", "--learning_rate=0", "=0.0: must be a positive number"),
    ("tensor_parallel", *_NO_CHECKPOINT),
    ("torch_style", "--devices=CPU:0,CPU:1", "the tutorial's world has 3 ranks"),
    ("torch_style", "--devices=CPU:0,CPU:1,GPU:99", "GPU:99 does not exist"),
    ("torch_style", "--batch_size=500", "more than the 479 training images of each"),
    ("torch_style", "--momentum=2", "=2: 2.0 is not a number in the range"),
    ("torch_style", "--momentum=nan", "--momentum=nan: must be a number"),
    ("torch_style", *_EXTRA),
]
_WITHOUT_FOLDER = {"global_batch_norm", "strategies", "torch_style"}


@pytest.mark.battery(3)
@pytest.mark.parametrize(("name", "given", "said"), _MISTAKES)
def test_a_mistake_is_one_line_and_status_2(
    name: str, given: str, said: str, tmp_path: pathlib.Path
) -> None:
    folder = [] if name in _WITHOUT_FOLDER else [f"--output_dir={tmp_path / 'new'}"]
    ended = programs.call(name, *folder, *given.split())
    programs.assert_refused(ended, name, said)
    assert not ended.stdout


_GAN = "--global_batch_size=8 --noise=4 --channels=2 --steps=20"
_TEXT = "--global_batch_size=64 --context=12 --width=8 --depth=1 --steps=20"
_IMAGES = "--global_batch_size=1000 --width=2 --blocks=1 --learning_rate=0.05"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "last", "other", "said"),
    [
        ("gan", _GAN, 20, "--seed=2", "--seed=1, not 2"),
        ("language_model", _TEXT, 20, "--depth=2", "--depth=1, not 2"),
        ("resnet", f"{_IMAGES} --epochs=2", 8, "--seed=2", "--seed=1, not 2"),
        (
            "tensor_parallel",
            "--batch_size=256 --epochs=2",
            10,
            "--devices=CPU:0",
            "--number_of_devices=2, not 1",
        ),
    ],
)
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_been(
    name: str, flags: str, last: int, other: str, said: str, tmp_path: pathlib.Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    programs.call_well(name, f"--output_dir={whole}", *flags.split())
    shutil.copytree(whole, broken)
    for path in (broken / "checkpoints").glob(f"ckpt-{last}.*"):
        path.unlink()  # as if it had been stopped at the checkpoint before
    resume = (f"--output_dir={broken}", "--resume", *flags.split())
    again = programs.call_well(name, *resume)
    assert "epoch 1/" not in again and f"Results are in {broken}" in again
    resumed, expected = programs.history(broken), programs.history(whole)
    assert resumed["steps"] == expected["steps"]
    for key in expected["steps"]:
        np.testing.assert_allclose(resumed[key], expected[key], rtol=0, atol=1e-6)
    for file in {"samples.png", "sample.txt"} & {path.name for path in whole.iterdir()}:
        assert (broken / file).read_bytes() == (whole / file).read_bytes()
    assert (whole / "curves.png").read_bytes().startswith(b"\x89PNG")
    ended = programs.call(name, *resume, other)
    programs.assert_refused(ended, name, f"the run began with {said}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "key", "least"),
    [
        pytest.param("digits", (), "accuracy", 0.97, marks=pytest.mark.gate),
        ("evolution", (), "policy", 400),
        ("pipeline", ("--mode=messages",), "accuracy", 0.96),
        ("pipeline", ("--mode=devices",), "accuracy", 0.96),
        ("resnet", (), "accuracy", 0.97),
        ("tensor_parallel", ("--nosequence_parallel",), "accuracy", 0.96),
        ("tensor_parallel", ("--sequence_parallel",), "accuracy", 0.96),
    ],
)
def test_the_default_run_learns(
    name: str,
    flags: tuple[str, ...],
    key: str,
    least: float,
    tmp_path: pathlib.Path,
) -> None:
    ended = programs.run(name, f"--output_dir={tmp_path}", *flags)
    assert ended.status == 0, ended.stderr
    assert programs.history(tmp_path)[key][-1] >= least
