# SPDX-License-Identifier: Apache-2.0
"""Watches over the other processes in between-graph mode, and frees what waits for one.

TensorFlow by itself ends a collective where a connection breaks, and where a process
was silent for the heartbeat; not where it waits for a process to begin, nor does its
store say that whoever was to tell something is gone. So a thread for each other process
holds a connection to it, which ends with the process, and asks now and then whether it
answers, as in watch.py. A process that was lost stays lost: collectives that were
aborted are so for good, and the program starts again everywhere.

Beside that, each process leaves a note in the store when its program ends.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import re
import sys
import time
from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf, errors
from replicator.cluster import cutting, description, waiting, watch

# Parts of the heartbeat: between two questions, and for the answer to one. A silent
# process is asked twice, and is named before the heartbeat is over.
_PAUSE, _ANSWER = 0.15, 0.3
_QUICK = 0.3  # seconds for the store to answer
_CUTS = 0.1  # seconds between two cuts
_FAREWELL = 10.0  # seconds that the first process, whose store it is, waits for others
_MOST = 300  # characters of what a process tells of its end: TensorFlow cuts messages
_TOLD = re.compile(r"<<host (\d+): (.*?)>>")

REFUSED = os.strerror(errno.ECONNREFUSED).lower()
ENDED = "its program has ended"


class Neighbour(watch.Watcher):
    """Watches over one other process, until this one ends.

    Attributes:
        problem: What is wrong with it, for good, or None.
        last: The same.
    """

    def _watch(self) -> None:
        pause, limit = _PAUSE * self._heartbeat, _ANSWER * self._heartbeat
        unanswered = 0
        while not self._over(0):
            problem = waiting.ask(self.host.address, limit, stay=pause)
            unanswered = 0 if problem is None else unanswered + 1
            certain = problem not in (None, waiting.SILENT) or unanswered > 1
            note = ended(self.task) if certain or self.task == 0 else None
            if certain or note is not None:
                self._give_up(str(problem) if note is None else note)
                return

    def _give_up(self, problem: str) -> None:
        """Notes that the process is gone, and frees what waits for it."""
        self.problem = self.last = problem
        if problem != ENDED:  # the others may still end what it has ended
            abort(self.task, problem)
        silent = problem not in (ENDED, REFUSED)
        while silent and not self._over(_CUTS):
            if waiting.ask(self.host.address, _CUTS) is not None:
                cutting.cut(self.host.address)
        self._ended.wait()  # as long as this thread is there, it says what is wrong


def begin(hosts: Sequence[description.Host], own: int, heartbeat: float) -> None:
    """Watches over the other processes, and takes care of the end of this one.

    Args:
        hosts: All, in the order of their tasks.
        own: Which of them this process is.
        heartbeat: Seconds that one may be silent.
    """
    for task, host in enumerate(hosts):
        if task != own:
            Neighbour(host, task, watch.current(), heartbeat).start()
    pid = os.getpid()

    def leave() -> None:
        if os.getpid() == pid:
            _leave(own, heartbeat)

    atexit.register(leave)


def told(task: int, text: str) -> str:
    """Returns what other processes read out of TensorFlow's errors, by `read`."""
    plain = re.sub(r"[<>\"'\\\s]+", " ", text)[:_MOST].strip()
    return f"<<host {task}: {plain}>>"


def read(text: str) -> dict[int, str]:
    """Returns what processes have told, by their numbers, out of an error's text."""
    return {int(number): said for number, said in _TOLD.findall(text)}


def abort(task: int, problem: str) -> None:
    """Ends what waits in collectives of this process, since another is gone."""
    with contextlib.suppress(tf.errors.OpError):
        _tf.abort_collectives(told(task, problem))


def fail(own: int, text: str) -> None:
    """Ends what waits in collectives of all processes: this one cannot go on."""
    with contextlib.suppress(tf.errors.OpError):
        _note(own, text)
    with contextlib.suppress(tf.errors.OpError):
        _tf.abort_everywhere(told(own, text))


def ended(task: int) -> str | None:
    """Returns how the program of a process ended, None if it says nothing."""
    try:
        text = _tf.store_get(_key(task), _QUICK)
    except tf.errors.OpError:
        return None  # the store has ended, too
    return None if text is None else str(json.loads(text))


def _key(task: int) -> str:
    return f"replicator/ended/{task}"


def _note(own: int, text: str) -> None:
    _tf.store_put(_key(own), json.dumps(text))


def _leave(own: int, heartbeat: float) -> None:
    """Tells the other processes that the program of this one ends."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, errors.HostLostError):
        return  # they know
    if error is not None:
        fail(own, f"its program ended by {errors.told(error)}")
        return
    with contextlib.suppress(tf.errors.OpError):
        _note(own, ENDED)
        if own == 0:
            _wait_for_others(min(heartbeat, _FAREWELL))


def _wait_for_others(seconds: float) -> None:
    """Waits for the ends of all others that are there: their store is here."""
    until = time.monotonic() + seconds
    for neighbour in watch.watchers():
        while neighbour.problem is None and ended(neighbour.task) is None:
            if time.monotonic() > until:
                return
