# SPDX-License-Identifier: Apache-2.0
"""Actors: processes that play an environment for examples/learner.py.

    python examples/actors.py NUMBER LEARNER DESCRIPTOR

The learner starts each with this command: actor NUMBER of the process LEARNER, to which
it is connected by a file descriptor. It imports NumPy and gymnasium only, so it starts
quickly. However the learner ends, the connection ends with it, and so does the actor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from typing import Any

import gymnasium
import numpy as np

Weights = Sequence[np.ndarray]  # alternating kernels and biases
Trajectory = dict[str, np.ndarray]
SILENCE = 60  # seconds without any trajectory, after which a run is given up


@dataclasses.dataclass(frozen=True)
class Game:
    """What actors play, and how they send it.

    Attributes:
        environment: The name of gymnasium's environment.
        unroll: The number of steps in a trajectory.
        discount: The discount of rewards per step.
        seed: The seed of actions and episodes.
    """

    environment: str
    unroll: int
    discount: float
    seed: int


# --- In an actor's process ------------------------------------------------------------


class Player:
    """Plays one episode after the other.

    Args:
        game: What to play.
        seed: This actor's seed.
    """

    def __init__(self, game: Game, seed: Sequence[int]) -> None:
        self._game = game
        self._random = np.random.default_rng(seed)
        self._environment = gymnasium.make(game.environment)
        first = int(self._random.integers(2**31))
        self._seen: Any = self._environment.reset(seed=first)[0]
        self._return = 0.0

    def unroll(self, version: int, weights: Weights) -> tuple[Trajectory, list[float]]:
        """Returns some steps of a policy, and the returns of episodes that ended.

        Of T steps, `observations` [T + 1, ...] has one more row than the others: the
        final observation. `discounts` are 0 where an episode has ended.

        Args:
            version: The version of the weights; a part of the result.
            weights: The weights of the policy.
        """
        rows, returns = [], []
        for _ in range(self._game.unroll):
            logits = forward(weights, self._seen)
            action = int(np.argmax(logits + self._random.gumbel(size=logits.shape)))
            observation, reward, over, cut, _ = self._environment.step(action)
            self._return += float(reward)
            discount = 0.0 if over or cut else self._game.discount
            rows.append((self._seen, action, logits, float(reward), discount))
            self._seen = observation
            if over or cut:
                returns.append(self._return)
                self._seen, self._return = self._environment.reset()[0], 0.0
        observations, actions, all_logits, rewards, discounts = zip(*rows, strict=True)
        return {
            "observations": np.array([*observations, self._seen], np.float32),
            "actions": np.array(actions, np.int32),
            "logits": np.array(all_logits, np.float32),
            "rewards": np.array(rewards, np.float32),
            "discounts": np.array(discounts, np.float32),
            "version": np.array(version, np.float32),
        }, returns


def forward(weights: Weights, seen: np.ndarray) -> np.ndarray:
    """Returns the logits of a policy: tanh layers, and a linear one."""
    x = np.ravel(seen)
    *hidden, last = zip(weights[0::2], weights[1::2], strict=True)
    for kernel, bias in hidden:
        x = np.tanh(x @ kernel + bias)
    return x @ last[0] + last[1]


def main(number: str, learner: str, descriptor: str) -> None:
    """Plays until the learner is gone: receives weights, sends trajectories."""
    del number, learner  # only shown in the list of processes
    link: Any = connection.Connection(int(descriptor))
    with contextlib.suppress(EOFError, OSError):  # the learner is gone
        game, seed = link.recv()
        try:
            player = Player(Game(**game), seed)
            for version, weights in iter(link.recv, None):
                link.send(player.unroll(version, weights))
        except (EOFError, OSError):
            raise
        except Exception as error:
            link.send(f"{type(error).__name__}: {error}")


# --- In the learner's process ---------------------------------------------------------


class Actors:
    """Actors whose trajectories come together in one queue.

    Each trajectory is played with the newest weights that were published when it began.
    Actors that die are reported and restarted, a limited number of times.

    Args:
        count: The number of actors.
        game: What they play.
        restarts: How many restarts there may be in all before the run ends.
        capacity: The maximum number of waiting trajectories; actors then wait, too.
        warn: Called with a sentence about each restart.

    Attributes:
        failure: The reason why there will be no more trajectories, if any.
    """

    def __init__(
        self,
        count: int,
        game: Game,
        restarts: int,
        capacity: int,
        warn: Callable[[str], Any],
    ) -> None:
        self.failure: str | None = None
        self._count, self._game, self._warn = count, game, warn
        self._queue: queue.Queue[Trajectory] = queue.Queue(capacity)
        self._returns: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._restarts = iter(range(restarts))
        self._published: tuple[int, Weights] = (0, ())
        self._begun = 0
        self._closing = threading.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, version: int, weights: Weights) -> None:
        """Starts the actors with these weights."""
        self._begun = version
        self.publish(version, weights)
        for number in range(self._count):
            thread = threading.Thread(target=self._attend, args=(number,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def publish(self, version: int, weights: Weights) -> None:
        """Makes actors use these weights from their next trajectories on."""
        self._published = (version, weights)

    def trajectories(self) -> Iterator[Trajectory]:
        """Yields trajectories as they arrive, until `close` or a failure."""
        last = time.monotonic()
        while not self._over():
            try:
                yield self._queue.get(timeout=0.1)
                last = time.monotonic()
            except queue.Empty:
                if time.monotonic() - last > SILENCE:
                    self._fail(f"the actors have sent nothing for {SILENCE} seconds")

    def returns(self) -> list[float]:
        """Returns the returns of the episodes that ended since the last call."""
        return [self._returns.get() for _ in range(self._returns.qsize())]

    def processes(self) -> dict[int, int]:
        """Returns the process id of each running actor, by number."""
        return {number: process.pid for number, process in self._processes.items()}

    def close(self) -> None:
        """Ends all actors."""
        with self._lock:
            self._closing.set()
            for process in self._processes.values():
                process.kill()
        for thread in self._threads:
            thread.join()

    def _attend(self, number: int) -> None:
        """Keeps an actor running, one process after the other."""
        for life in itertools.count():
            problem = self._live(number, life)
            if self._over():
                return
            with self._lock:
                again = next(self._restarts, None) is not None
            if not again:
                self._fail(problem)
                return
            self._warn(f"{problem}, and is restarted")

    def _live(self, number: int, life: int) -> str:
        """Serves one process until it ends; returns how it ended."""
        with self._lock:
            if self._over():
                return ""
            process, link = self._spawn(number)
            self._processes[number] = process
        problem = ""
        with process, link:  # the process sees the link close, and exits
            with contextlib.suppress(EOFError, OSError):  # it has ended
                seed = (self._game.seed, self._begun, number, life)
                link.send((dataclasses.asdict(self._game), seed))
                while not problem and not self._over():
                    link.send(self._published)
                    problem = self._take(link.recv())
        problem = problem or how_it_ended(process.returncode)
        return f"actor {number} (process {process.pid}) {problem}"

    def _spawn(self, number: int) -> tuple[subprocess.Popen[bytes], Any]:
        """Starts a process; returns it, and the connection to it."""
        link, actor_end = connection.Pipe()
        with actor_end:
            arguments = [str(number), str(os.getpid()), str(actor_end.fileno())]
            process = subprocess.Popen(
                [sys.executable, str(pathlib.Path(__file__).resolve()), *arguments],
                pass_fds=[actor_end.fileno()],
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is for the learner only
            )
        return process, link

    def _take(self, received: Any) -> str:
        """Handles what an actor has sent; returns the problem with it, or ""."""
        if isinstance(received, str):
            return f"failed: {received}"
        trajectory, returns = received
        for number in returns:
            self._returns.put(number)
        while not self._over():
            with contextlib.suppress(queue.Full):
                self._queue.put(trajectory, timeout=0.1)
                break
        return ""

    def _over(self) -> bool:
        """Whether no more trajectories are wanted."""
        return self._closing.is_set() or self.failure is not None

    def _fail(self, problem: str) -> None:
        """Gives up the run."""
        with self._lock:
            self.failure = self.failure or problem


def how_it_ended(status: int) -> str:
    """Describes the exit status of a process, to follow "process 12 ..."."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


if __name__ == "__main__":
    main(*sys.argv[1:])
