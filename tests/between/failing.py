# SPDX-License-Identifier: Apache-2.0
"""A training by the launcher, with a fault in each life of all hosts but the last.

`python -m tests.between.failing KIND MOMENT HOST COUNT FOLDER` is the program. KIND is
kill, stop, cut (which the test does when it reads "fault"), none, or nap: a stop that
ends before the heartbeat, COUNT times in one life. MOMENT is build, step, function or
checkpoint. It writes the lines "begun", "loss", "fault" and "named", which the test
reads. Times are those of CLOCK_MONOTONIC, which all processes share.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import replicator
from tests.between.launched import say
from tests.cluster import faulty

# Maximum seconds after the moment: a fault is inside the event, or next to it.
_LATE = {"build": 0.3, "step": 0.02, "function": 0.02, "checkpoint": 0.06}
_SLOW = 0.05  # seconds
NAP = 4.0  # seconds
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def steps(count: int) -> int:
    """Returns the number of steps, enough for each life to reach its fault."""
    return 4 * faulty.EVERY * (count + 1)


class _Told(dict[int, str]):
    """Losses, which are printed immediately."""

    slow = False  # while the test takes its time to cut a link

    def __setitem__(self, k: int, loss: str) -> None:
        super().__setitem__(k, loss)
        say("loss", k, loss)
        if self.slow:
            time.sleep(_SLOW)


class Life(faulty.Training):
    """One life of the training, with a fault after its first checkpoint.

    Args:
        moment: The moment of the fault.
        fault: Causes the fault.
        count: The number of lives with a fault.
        number: The number of this life.
    """

    def __init__(
        self, moment: str, fault: Callable[[], None], count: int, number: int
    ) -> None:
        super().__init__(moment, fault, steps(count))
        self.losses = self.told = _Told()
        # In every other life the fault comes after the step is built.
        self._later = moment == "build" and number % 2 == 1
        self._building = not self._later

    def _begin(self, repl: replicator.Replicator, step: int) -> None:
        self._repl, self._fault_at = repl, step + faulty.EVERY * 3 // 2
        say("begun", step)

    def again(self) -> None:
        """Schedules another fault."""
        self._fault_at += faulty.EVERY

    def _now(self, moment: str, k: int) -> None:
        if moment == "step" and self._later and k == self._fault_at:
            self._building = True
            self._build_another()
        if moment != "build" or self._building:
            super()._now(moment, k)

    def _build_another(self) -> None:
        def step_fn() -> Any:
            self._now("build", self._fault_at)
            return self._repl.all_reduce(1.0 + self._repl.replica_id)

        self._repl.run(step_fn)


def _fail(kind: str, moment: str) -> None:
    """Causes the fault soon."""

    def now() -> None:
        say("fault", time.monotonic())
        if kind == "nap":
            faulty.stop_for(NAP)
        elif kind in _SIGNALS:
            os.kill(os.getpid(), _SIGNALS[kind])

    threading.Timer(random.uniform(0, _LATE[moment]), now).start()


def main(kind: str, moment: str, which: str, count: str, folder: str) -> None:
    """Trains, from the newest checkpoint on."""
    cluster = replicator.connect(timeout=120)
    number = int(os.environ["REPLICATOR_RESTARTS"])
    failing = kind != "none" and number < int(count) and cluster.host_id == int(which)
    begun: list[int] = []

    def fault() -> None:
        if failing and len(begun) < (int(count) if kind == "nap" else 1):
            begun.append(1)
            life.again()
            life.told.slow = kind == "cut"
            _fail(kind, moment)

    life = Life(moment, fault, int(count), number)
    try:
        life.train(cluster, folder)
    except replicator.HostLostError as error:
        say("named", life.at, *error.hosts)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
