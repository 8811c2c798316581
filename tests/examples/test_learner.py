# SPDX-License-Identifier: Apache-2.0
"""examples/learner.py and actors.py: V-trace, actors that die, returns that rise."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.examples import programs

learner = programs.load("learner")
actors = learner.actors

GAME = actors.Game("CartPole-v1", unroll=5, discount=0.9, seed=3)
UNTRAINED = [np.zeros([4, 2], np.float32), np.zeros(2, np.float32)]


# --- V-trace --------------------------------------------------------------------------


def by_definition(
    ratios: np.ndarray, discounts: np.ndarray, rewards: np.ndarray, values: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Equation 1 of the paper, a sum for each step, and the resulting advantages."""
    rho = c = np.minimum(1.0, ratios)
    steps = len(rewards)

    def target(s: int) -> float:
        total = values[s]
        for t in range(s, steps):
            factor = np.prod(discounts[s:t]) * np.prod(c[s:t])
            error = rewards[t] + discounts[t] * values[t + 1] - values[t]
            total += factor * rho[t] * error
        return total

    targets = np.array([target(s) for s in range(steps)])
    after = np.append(targets[1:], values[steps])
    return targets, rho * (rewards + discounts * after - values[:steps])


@pytest.mark.parametrize("spread", [0.0, 1.0, 5.0])
def test_v_trace_is_that_of_the_definition(spread: float) -> None:
    rng = np.random.default_rng(0)
    ratios = np.exp(rng.normal(0, spread, [3, 7]))
    discounts = np.where(rng.random([3, 7]) < 0.2, 0.0, 0.9)
    rewards, values = rng.normal(size=[3, 7]), rng.normal(size=[3, 8])
    actual = learner.vtrace(
        *map(tf.constant, (np.log(ratios), discounts, rewards, values))
    )
    rows = zip(ratios, discounts, rewards, values, strict=True)
    expected = zip(*(by_definition(*row) for row in rows), strict=True)
    for own, right in zip(actual, expected, strict=True):
        np.testing.assert_allclose(own, np.stack(right), rtol=1e-12, atol=1e-12)


def test_the_targets_of_the_policy_itself_are_the_discounted_returns() -> None:
    rewards, values = np.array([1.0, 2.0, 3.0]), np.array([7.0, 8.0, 9.0, 10.0])
    targets, _ = learner.vtrace(
        *(tf.constant(x[np.newaxis]) for x in (np.zeros(3), np.full(3, 0.5))),
        *(tf.constant(x[np.newaxis]) for x in (rewards, values)),
    )
    np.testing.assert_allclose(targets, [[1 + 1 + 0.75 + 1.25, 2 + 1.5 + 2.5, 3 + 5]])


# --- The step -------------------------------------------------------------------------


def batch(size: int) -> dict[str, np.ndarray]:
    players = [actors.Player(GAME, [n]) for n in range(size)]
    rows = [player.unroll(n, UNTRAINED)[0] for n, player in enumerate(players)]
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def trained(replicas: int) -> tuple[Any, dict[str, float]]:
    repl = helpers.make(replicas)
    agent = learner.Learner(repl, 4, 2, 1e-2, seed=1)
    data = tf.data.Dataset.from_tensors(batch(4)).repeat()
    for _ in range(3):
        logs = repl.run(agent.step, data, input_mode="global_batch")
    return agent, {name: float(value[0]) for name, value in logs.items()}


def test_a_step_is_that_of_one_device() -> None:
    one, expected = trained(1)
    two, logs = trained(2)
    assert logs == pytest.approx(expected, abs=1e-5)
    weights = zip(two.network.get_weights(), one.network.get_weights(), strict=True)
    for own, right in weights:
        np.testing.assert_allclose(own, right, rtol=0, atol=1e-5)


def test_actors_have_the_policy_of_the_network() -> None:
    agent, _ = trained(1)
    observations = np.random.default_rng(0).normal(size=[3, 4]).astype(np.float32)
    logits = [actors.forward(agent.policy(), row) for row in observations]
    np.testing.assert_allclose(
        logits, agent.network(observations)[0], rtol=0, atol=1e-5
    )


# --- Actors ---------------------------------------------------------------------------


def test_a_player_goes_on_where_it_was_and_marks_the_ends_of_episodes() -> None:
    one, two = (actors.Player(GAME, [5]) for _ in range(2))
    first, second = (two.unroll(0, UNTRAINED) for _ in range(2))
    np.testing.assert_array_equal(
        first[0]["observations"][-1], second[0]["observations"][0]
    )
    again = one.unroll(0, UNTRAINED)
    for name, values in again[0].items():
        np.testing.assert_array_equal(values, first[0][name])

    rewards, discounts, returns = [], [], []
    for _ in range(20):
        trajectory, ended = one.unroll(0, UNTRAINED)
        rewards += trajectory["rewards"].tolist()
        discounts += trajectory["discounts"].tolist()
        returns += ended
    ends = np.flatnonzero(np.equal(discounts, 0.0))
    assert set(discounts) == {0.0, np.float32(0.9)}
    assert len(ends) == len(returns) > 2
    lengths = np.diff(ends)
    np.testing.assert_array_equal(lengths, returns[1:])  # a reward of 1 for each step


@contextlib.contextmanager
def playing(restarts: int, game: Any = GAME) -> Iterator[tuple[Any, list[str]]]:
    """Two running actors, and their warnings."""
    messages: list[str] = []
    players = actors.Actors(2, game, restarts, 4, messages.append)
    players.start(0, UNTRAINED)
    try:
        yield players, messages
    finally:
        players.close()


def is_alive(pid: int) -> bool:
    return pathlib.Path(f"/proc/{pid}").exists()


def test_weights_reach_the_actors_and_none_is_left_behind() -> None:
    with playing(restarts=0) as (players, warnings):
        trajectories = players.trajectories()
        assert next(trajectories)["version"] == 0
        players.publish(8, UNTRAINED)
        assert any(next(trajectories)["version"] == 8 for _ in range(20))
        assert any(next(trajectories) and players.returns() for _ in range(200))
        processes = players.processes()
        assert len(processes) == 2
        assert all(map(is_alive, processes.values()))
    assert not any(map(is_alive, processes.values()))
    assert list(trajectories) == warnings == []


def test_an_actor_that_dies_is_named_and_started_again_or_ends_the_run() -> None:
    with playing(restarts=1) as (players, warnings):
        trajectories = players.trajectories()
        next(trajectories)
        first = players.processes()[0]
        os.kill(first, signal.SIGKILL)
        while players.processes()[0] == first:
            next(trajectories)
        expected = f"actor 0 (process {first}) was killed by SIGKILL"
        assert warnings == [f"{expected}, and is restarted"]
        second = players.processes()[0]
        os.kill(second, signal.SIGTERM)
        for _ in trajectories:
            pass
        assert players.failure == f"actor 0 (process {second}) was killed by SIGTERM"
        processes = players.processes()
    assert not any(map(is_alive, processes.values()))


def test_actors_that_are_silent_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with playing(restarts=0) as (players, _):
        trajectories = players.trajectories()
        next(trajectories)
        for process in players.processes().values():
            os.kill(process, signal.SIGSTOP)
        monkeypatch.setattr(actors, "SILENCE", 0.5)
        for _ in trajectories:
            pass
        assert players.failure == "the actors have sent nothing for 0.5 seconds"
        processes = players.processes()
    assert not any(map(is_alive, processes.values()))


def test_an_actor_that_fails_says_why() -> None:
    game = actors.Game("NoSuchGame-v0", unroll=5, discount=0.9, seed=3)
    with playing(0, game) as (players, _):
        assert list(players.trajectories()) == []
        assert "failed: NameNotFound: Environment `NoSuchGame`" in players.failure


# --- The program ----------------------------------------------------------------------

TINY = ["--steps=12", "--batch_size=4", "--unroll=10"]


def test_a_run_leaves_what_it_says_and_goes_on(tmp_path: pathlib.Path) -> None:
    folder = f"--output_dir={tmp_path}"
    printed = programs.call_well("learner", folder, *TINY)
    assert "step 12/12  480 frames  mean return" in printed
    before = programs.history(tmp_path)
    assert before["steps"]["loss"] == list(range(1, 13))
    assert min(before["steps_behind"]) >= 0
    printed = programs.call_well("learner", folder, "--resume", *TINY, "--steps=14")
    assert f"Results are in {tmp_path}" in printed
    after = programs.history(tmp_path)
    assert after["steps"]["loss"] == list(range(1, 15))
    assert after["loss"][:12] == before["loss"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "summaries").glob("events.out.tfevents.*"))


def actors_of(pid: int) -> list[int]:
    """Returns the actor processes of a learner."""
    actors = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode().split("\0")
            if any("actors.py" in word for word in words) and str(pid) in words:
                actors.append(int(path.parent.name))
    return actors


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_whatever_ends_the_learner_no_actor_is_left(
    signum: signal.Signals, tmp_path: pathlib.Path
) -> None:
    command = [sys.executable, str(programs.EXAMPLES / "learner.py")]
    flags = [f"--output_dir={tmp_path}", "--steps=100000", "--batch_size=4"]
    with subprocess.Popen(
        [*command, *flags],
        env=programs.ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=programs.as_in_a_terminal,
    ) as process:
        for line in process.stderr or ():
            if "mean_return" in line:
                break
        assert len(actors_of(process.pid)) == 2
        process.send_signal(signum)
        process.communicate()
    expected = -signum if signum == signal.SIGKILL else 128 + signum
    assert process.returncode == expected
    deadline = time.monotonic() + 20
    while actors_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not actors_of(process.pid)


@pytest.mark.slow
def test_actors_that_die_again_and_again_end_the_run_with_one_line(
    tmp_path: pathlib.Path,
) -> None:
    command = [sys.executable, str(programs.EXAMPLES / "learner.py")]
    flags = [f"--output_dir={tmp_path}", "--steps=100000", "--restarts=1"]
    with subprocess.Popen(
        [*command, *flags],
        env=programs.ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        killed: list[int] = []
        while process.poll() is None and len(killed) < 2:
            time.sleep(0.2)
            for pid in set(actors_of(process.pid)[:1]) - set(killed):
                time.sleep(1)
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        _, printed = process.communicate(timeout=120)
    assert process.returncode == 1
    messages = [line for line in printed.split("\n") if line.startswith("learner.py: ")]
    assert len(messages) == 2
    assert (
        f"(process {killed[0]}) was killed by SIGKILL, and is restarted" in messages[0]
    )
    assert messages[1].startswith(
        "learner.py: error: stopped, continue with --resume: actor "
    )
    assert messages[1].endswith(f"(process {killed[1]}) was killed by SIGKILL")
    assert "Traceback" not in printed
    assert not actors_of(process.pid)


@pytest.mark.slow
def test_the_return_rises(tmp_path: pathlib.Path) -> None:
    ended = programs.run("learner", f"--output_dir={tmp_path}")
    assert ended.status == 0, ended.stderr
    returns = programs.history(tmp_path)["mean_return"]
    assert returns[10] < 60
    assert np.mean(returns[-100:]) > 150
