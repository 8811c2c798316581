# SPDX-License-Identifier: Apache-2.0
"""Announces that this program is alive, and finds silent ones, in asynchronous mode.

TensorFlow's connection knows which program this is, and a thread holds the state that
belongs to it, so this module keeps none.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from absl import logging

from replicator import devices
from replicator.cluster import state, watch
from replicator.hosts.asynchronous.board import (
    BEATS,
    ENDED,
    LOST,
    PRESENT,
    STATES,
    Board,
)
from replicator.hosts.asynchronous.clock import Clock
from replicator.hosts.asynchronous.events import Events
from replicator.hosts.asynchronous.store import Store

_BEAT = 0.2  # the time between two beats, as a fraction of the heartbeat


class Member(threading.Thread):
    """A thread that signals that this program is alive, and declares silent ones lost.

    Args:
        board: The table that the programs share.
        names: The names of the programs.
        heartbeat: How many seconds a program may be silent.
        token: The connection to the servers.

    Attributes:
        board: The table that the programs share.
        names: The names of the programs.
        token: The connection to the servers.
        events: The log of this program.
        store: The variables that the programs share.
        checkpoints: Numbers this program's checkpoints.
    """

    def __init__(
        self, board: Board, names: tuple[str, ...], heartbeat: float, token: Any
    ) -> None:
        super().__init__(name="replicator is alive", daemon=True)
        self.board, self.names, self.token = board, names, token
        self.events = Events(board.program)
        servers = devices.of_hosts_cpus()
        self.store = Store(board, names, servers, max(60.0, heartbeat))
        self._heartbeat = heartbeat
        self._over = threading.Event()
        self.checkpoints = itertools.count()
        self._last_beats: dict[
            int, tuple[int, float]
        ] = {}  # by program: last beat, time

    def clock(self, staleness: int | None) -> Clock:
        """Returns the clock for a staleness bound."""
        return Clock(self.board, self.names, self.events, staleness)

    def run(self) -> None:
        """Beats and looks for silent programs, until this program ends."""
        beat = 0
        while not self._over.wait(_BEAT * self._heartbeat):
            if watch.current() is not self.token:
                return
            beat += 1
            try:
                self.board.write(BEATS, beat)
                self._look()
            except Exception:  # the server is gone, as the program will notice
                return

    def _look(self) -> None:
        """Declares programs lost that have been silent for a heartbeat."""
        table, now = self.board.read(), time.monotonic()
        for n, (beat, status) in enumerate(
            zip(table[BEATS], table[STATES], strict=True)
        ):
            if status != PRESENT or n == self.board.program:
                self._last_beats.pop(n, None)
                continue
            last, since = self._last_beats.setdefault(n, (int(beat), now))
            if last != beat:
                self._last_beats[n] = int(beat), now
            elif now - since > self._heartbeat:
                self.board.write(STATES, LOST, n)
                self.events.note("lost", program=n)
                logging.error(
                    "%s has been silent for %g s; the others continue without it.",
                    self.names[n],
                    self._heartbeat,
                )

    def end(self) -> None:
        """Marks this program as ended."""
        self._over.set()
        self.join()
        if watch.current() is self.token:
            try:
                self.board.write(STATES, ENDED)
            except Exception:  # as above
                logging.info("Could not report this program's end: the server is gone.")
        self.events.note("ended")


def member() -> Member | None:
    """Returns this program's membership; None outside of asynchronous mode."""
    if state.trainer() is None:
        return None
    token = watch.current()
    for thread in threading.enumerate():
        if isinstance(thread, Member) and thread.token is token:
            return thread
    return None
