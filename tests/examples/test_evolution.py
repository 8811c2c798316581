# SPDX-License-Identifier: Apache-2.0
"""examples/evolution.py: the same for any number of replicas, and returns that rise."""

from __future__ import annotations

import pathlib
from typing import Any

import gymnasium
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import replicator
from tests import helpers
from tests.examples import programs

evolution = programs.load("evolution")

PAIRS, NOISE, RATE, SEED = 4, 0.5, 0.1, 7


def make(repl: replicator.Replicator, environment: str = "CartPole-v1") -> Any:
    task = evolution.Task.of(environment)
    return evolution.Evolution(repl, task, PAIRS, NOISE, RATE, SEED)


def policy(parameters: np.ndarray, seen: np.ndarray) -> int:
    """The action of one perceptron with 4 inputs, 16 units and 2 outputs."""
    first, bias = parameters[:64].reshape(4, 16), parameters[64:80]
    second, last = parameters[80:112].reshape(16, 2), parameters[112:]
    return int(np.argmax(np.tanh(seen @ first + bias) @ second + last))


def play(parameters: np.ndarray, seed: int) -> float:
    game, total, over = gymnasium.make("CartPole-v1"), 0.0, False
    observation, _ = game.reset(seed=seed)
    while not over:
        observation, reward, ended, cut, _ = game.step(policy(parameters, observation))
        total, over = total + float(reward), ended or cut
    return total


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_generation_is_that_of_the_definition(replicas: int) -> None:
    repl = helpers.make(replicas)
    evolution = make(repl)
    before = evolution.parameters.numpy()
    mean = repl.run(evolution.step, args=(3,))

    noise = tf.random.stateless_normal([PAIRS, before.size], [SEED, 6]).numpy()
    drawn = tf.random.stateless_uniform([PAIRS], [SEED, 7], 0, 2**31 - 1, tf.int32)
    seeds = drawn.numpy().tolist()
    tried = [
        *zip(before + NOISE * noise, seeds, strict=True),
        *zip(before - NOISE * noise, seeds, strict=True),
    ]
    returns = [play(parameters, seed) for parameters, seed in tried]
    ranks = (stats.rankdata(returns).reshape(2, -1) - (2 * PAIRS + 1) / 2) / (2 * PAIRS)
    uphill = (ranks[0] - ranks[1]) @ noise / (2 * PAIRS * NOISE)
    expected, adam = tf.Variable(before), tf.keras.optimizers.Adam(RATE)
    adam.apply_gradients([(tf.constant(-uphill, tf.float32), expected)])

    np.testing.assert_allclose([float(m) for m in mean], np.mean(returns))
    np.testing.assert_allclose(evolution.parameters, expected, rtol=0, atol=1e-6)


def test_replicas_send_their_returns_and_nothing_else() -> None:
    repl = helpers.make(2)
    step = repl.build(make(repl).step, args=(0,))
    (row,) = step.plan
    assert row.primitive == "all_gather"
    own, all_of_them = 4 * PAIRS, 4 * 2 * PAIRS  # bytes
    assert step.plan.totals.per_step.nbytes == own + all_of_them  # there and back


def test_numbered_and_continuous_actions_are_played() -> None:
    repl = helpers.make(2)
    evolution = make(repl, "Pendulum-v1")
    before = evolution.parameters.numpy()
    (mean, _) = repl.run(evolution.step, args=(0,))
    assert -2000 < float(mean) < 0
    assert np.abs(evolution.parameters - before).max() > 0


def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_been_and_returns_rise(
    tmp_path: pathlib.Path,
) -> None:
    flags = ["--pairs=16", "--judge_every=4", "--noise=0.2", "--learning_rate=0.1"]
    broken, whole = (f"--output_dir={tmp_path / name}" for name in ("broken", "whole"))
    programs.call_well("evolution", broken, *flags, "--steps=6")
    flags.append("--steps=10")
    one = "--devices=CPU:0"
    printed = programs.call_well("evolution", broken, *flags, "--resume", one)
    programs.call_well("evolution", whole, *flags)

    resumed, expected = (
        programs.history(tmp_path / name) for name in ("broken", "whole")
    )
    assert resumed == expected
    assert expected["steps"]["policy"] == [4, 8]
    assert np.mean(expected["generation"][-3:]) > 1.5 * expected["generation"][0]
    assert "generation 8/10  mean return" in printed
    assert f"Results are in {tmp_path / 'broken'}" in printed
    picture = tmp_path / "whole" / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
