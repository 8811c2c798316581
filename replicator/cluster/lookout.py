# SPDX-License-Identifier: Apache-2.0
"""Monitors the other processes in between-graph mode, and unblocks calls to lost ones.

TensorFlow itself ends a collective when a connection breaks, or when a process is
silent for the heartbeat. It does not if the collective still waits for a process to
begin, and its store never reports that the writer of a missing entry is gone. So one
thread per other process holds a connection to it, which ends with the process, and
probes it at intervals, as in watch.py. A lost process stays lost: aborted collectives
cannot be revived, and the program restarts everywhere.

Each process also leaves a note in the store when its program ends.
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

from replicator import errors
from replicator._tf import cluster
from replicator.cluster import cutting, description, waiting, watch

# Fractions of the heartbeat: between two probes, and for the answer to one. A silent
# process is probed twice, and is named before the heartbeat is over.
_PAUSE, _ANSWER = 0.15, 0.3
_QUICK = 0.3  # seconds for the store to answer
_CUTS = 0.1  # seconds between two cuts
_FAREWELL = 10.0  # seconds for which the first process keeps the store for the others
_MOST = 300  # characters of a process's last note: TensorFlow truncates messages
_REPORT = re.compile(r"<<host (\d+): (.*?)>>")

REFUSED = os.strerror(errno.ECONNREFUSED).lower()
ENDED = "its program has ended"


class Neighbour(watch.Watcher):
    """Monitors one other process until this one ends.

    Attributes:
        problem: The permanent problem of the process, or None.
        last: The same as `problem`.
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
        """Records that the process is gone, and unblocks calls that wait for it."""
        self.problem = self.last = problem
        if problem != ENDED:  # the others may still complete their last step
            abort(self.task, problem)
        silent = problem not in (ENDED, REFUSED)
        while silent and not self._over(_CUTS):
            if waiting.ask(self.host.address, _CUTS) is not None:
                cutting.cut(self.host.address)
        self._ended.wait()  # `problem` can be read for as long as this thread lives


def begin(hosts: Sequence[description.Host], process: int, heartbeat: float) -> None:
    """Starts monitoring the other processes, and reports this one's end at exit.

    Args:
        hosts: All hosts, in task order.
        process: The number of this process.
        heartbeat: How many seconds a process may be silent.
    """
    for task, host in enumerate(hosts):
        if task != process:
            Neighbour(host, task, watch.current(), heartbeat).start()
    pid = os.getpid()

    def leave() -> None:
        if os.getpid() == pid:
            _leave(process, heartbeat)

    atexit.register(leave)


def report(task: int, text: str) -> str:
    """Encodes a report that other processes `read` from TensorFlow's errors."""
    plain = re.sub(r"[<>\"'\\\s]+", " ", text)[:_MOST].strip()
    return f"<<host {task}: {plain}>>"


def read(text: str) -> dict[int, str]:
    """Returns the reports in the text of an error, by the numbers of the processes."""
    return {int(number): report for number, report in _REPORT.findall(text)}


def abort(task: int, problem: str) -> None:
    """Aborts this process's collectives, since another process is gone."""
    with contextlib.suppress(tf.errors.OpError):
        cluster.abort_collectives(report(task, problem))


def fail(process: int, text: str) -> None:
    """Aborts the collectives of all processes, since this one cannot go on."""
    with contextlib.suppress(tf.errors.OpError):
        _note(process, text)
    with contextlib.suppress(tf.errors.OpError):
        cluster.abort_all_processes(report(process, text))


def ended(task: int) -> str | None:
    """Returns how the program of a process ended; None if it left no note."""
    try:
        text = cluster.store_get(_key(task), _QUICK)
    except tf.errors.OpError:
        return None  # the store is gone, too
    return None if text is None else str(json.loads(text))


def _key(task: int) -> str:
    return f"replicator/ended/{task}"


def _note(process: int, text: str) -> None:
    cluster.store_put(_key(process), json.dumps(text))


def _leave(process: int, heartbeat: float) -> None:
    """Tells the other processes that the program of this one ends."""
    error = getattr(sys, "last_value", None)
    if isinstance(error, errors.HostLostError):
        return  # they know already
    if error is not None:
        fail(process, f"its program ended with {errors.summary(error)}")
        return
    with contextlib.suppress(tf.errors.OpError):
        _note(process, ENDED)
        if process == 0:
            _wait_for_others(min(heartbeat, _FAREWELL))


def _wait_for_others(seconds: float) -> None:
    """Waits for the other live processes to end: this one hosts their store."""
    deadline = time.monotonic() + seconds
    for neighbour in watch.watchers():
        while neighbour.problem is None and ended(neighbour.task) is None:
            if time.monotonic() > deadline:
                return
