# SPDX-License-Identifier: Apache-2.0
"""This program as one of several: tells that it lives, and looks whether others do.

Which of them it is, TensorFlow's connection says; what goes with that is kept by a
thread, so nothing is kept here.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from absl import logging

from replicator import devices
from replicator.asynchronous.board import BEATS, ENDED, LOST, PRESENT, STATES, Board
from replicator.asynchronous.clock import Clock
from replicator.asynchronous.events import Events
from replicator.asynchronous.store import Store
from replicator.cluster import state, watch

_BEAT = 0.2  # parts of a heartbeat between two signs of life


class Member(threading.Thread):
    """This program's membership: tells that it lives, and looks whether others do.

    Args:
        board: What the programs tell one another.
        names: Of the programs.
        heartbeat: Seconds that one may be silent.
        token: The connection to the servers.

    Attributes:
        board: That.
        names: Those.
        token: That.
        events: The program's log.
        store: The variables that it shares.
    """

    def __init__(
        self, board: Board, names: tuple[str, ...], heartbeat: float, token: Any
    ) -> None:
        super().__init__(name="replicator is alive", daemon=True)
        self.board, self.names, self.token = board, names, token
        self.events = Events(board.own)
        servers = devices.of_hosts_cpus()
        self.store = Store(board, names, servers, max(60.0, heartbeat))
        self._heartbeat = heartbeat
        self._over = threading.Event()
        self.checkpoints = itertools.count()  # numbers for them
        self._heard: dict[int, tuple[int, float]] = {}  # by program: which beat, when

    def clock(self, staleness: int | None) -> Clock:
        """Returns the clock of steps that may be so far ahead."""
        return Clock(self.board, self.names, self.events, staleness)

    def run(self) -> None:
        """Tells and looks, until the program ends."""
        beat = 0
        while not self._over.wait(_BEAT * self._heartbeat):
            if watch.current() is not self.token:
                return
            beat += 1
            try:
                self.board.write(BEATS, beat)
                self._look()
            except Exception:  # the server is gone, of which the program will hear
                return

    def _look(self) -> None:
        """Declares lost who has been silent for a heartbeat."""
        table, now = self.board.read(), time.monotonic()
        for n, (beat, at) in enumerate(zip(table[BEATS], table[STATES], strict=True)):
            if at != PRESENT or n == self.board.own:
                self._heard.pop(n, None)
                continue
            last, since = self._heard.setdefault(n, (int(beat), now))
            if last != beat:
                self._heard[n] = int(beat), now
            elif now - since > self._heartbeat:
                self.board.write(STATES, LOST, n)
                self.events.note("lost", program=n)
                logging.error(
                    "%s has been silent for %g s; the others go on without it.",
                    self.names[n],
                    self._heartbeat,
                )

    def end(self) -> None:
        """Tells that the program ends."""
        self._over.set()
        self.join()
        if watch.current() is self.token:
            try:
                self.board.write(STATES, ENDED)
            except Exception:  # as above
                logging.info("The end could not be told: the server is gone.")
        self.events.note("ended")


def member() -> Member | None:
    """Returns this program's membership; None if it is none of several programs."""
    if state.trainer() is None:
        return None
    token = watch.current()
    for thread in threading.enumerate():
        if isinstance(thread, Member) and thread.token is token:
            return thread
    return None
