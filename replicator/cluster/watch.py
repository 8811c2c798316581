# SPDX-License-Identifier: Apache-2.0
"""Watches over the hosts of a connection, and frees what waits for a silent one.

A thread for each host asks its server now and then, by the first bytes of HTTP/2, which
a process that is stopped does not answer, nor one behind a link that is cut. As long as
it does not, this process's connections to it are shut down, so that a step that waits
for it fails, and so does the next. Where TensorFlow holds Python's lock while it waits,
a process beside this one does that (lifeline.py).

Which threads there are says Python itself, so nothing is kept here.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from replicator import _tf
from replicator.cluster import addresses, cutting, description, lifeline, waiting

# Parts of the heartbeat: between two questions, and for the answer to one. Together
# they leave time to free the step and to name the host.
_PAUSE, _ANSWER = 0.15, 0.4
_CUTS = 0.1  # seconds between two cuts while a host is silent: TensorFlow tries again
_CUTS_AT_ONCE = 10  # between two questions


class Lifeline:
    """The process beside this one that shuts connections down; it ends with this one.

    Args:
        hosts: The hosts.
        heartbeat: Seconds that one may be silent.
    """

    def __init__(self, hosts: Sequence[description.Host], heartbeat: float) -> None:
        facts = {
            "hosts": [addresses.split(host.address) for host in hosts],
            "pause": _PAUSE * heartbeat,
            "limit": _ANSWER * heartbeat,
        }
        self._control, theirs = socket.socketpair()
        self._users, self._lock = len(hosts), threading.Lock()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", lifeline.__file__, json.dumps(facts)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # no terminal's Ctrl-C reaches it
            )

    def hand_over(self, task: int, address: str) -> None:
        """Gives it this process's connections to a host.

        Args:
            task: The host's number.
            address: The host's.
        """
        with contextlib.ExitStack() as stack:
            found = [stack.enter_context(c) for c in cutting.connections(address)]
            descriptors = [connection.fileno() for connection in found]
            lifeline.hand_over(self._control, task, descriptors)

    def end(self) -> None:
        """Has it shut nothing down from now on."""
        self._process.kill()

    def release(self) -> None:
        """Has it end once all have called this."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._control.close()
                self._process.wait()


class Watcher(threading.Thread):
    """Watches over one host, as long as its connection is the one there is.

    Args:
        host: The host.
        task: Its number in the connection.
        token: The connection, as `_tf.connection` returns it.
        heartbeat: Seconds that it may be silent.
        beside: What frees where no thread can, or None.

    Attributes:
        problem: What is wrong with it now, or None.
        last: What was wrong with it last, or None.
    """

    def __init__(
        self,
        host: description.Host,
        task: int,
        token: Any,
        heartbeat: float,
        beside: Lifeline | None = None,
    ) -> None:
        super().__init__(name=f"replicator watches {host.name}", daemon=True)
        self.host, self.task, self.token = host, task, token
        self._heartbeat, self._beside = heartbeat, beside
        self._ended, self._cutting = threading.Event(), threading.Lock()
        self.problem: str | None = None
        self.last: str | None = None

    def run(self) -> None:
        """Asks, until the connection is closed or replaced."""
        try:
            self._watch()
        finally:
            if self._beside is not None:
                self._beside.release()

    def end(self) -> None:
        """Has it end soon, and shut nothing down from now on.

        A connection that is made next may be to a host that was silent a moment ago.
        """
        with self._cutting:
            self._ended.set()
        if self._beside is not None:
            self._beside.end()

    def _watch(self) -> None:
        while True:
            if self._beside is not None:
                self._beside.hand_over(self.task, self.host.address)
            if self._over(_PAUSE * self._heartbeat):
                return
            problem = waiting.ask(self.host.address, _ANSWER * self._heartbeat)
            self.problem = problem
            if problem is not None:
                self.last = problem
                self._free()

    def _free(self) -> None:
        for _ in range(_CUTS_AT_ONCE):
            with self._cutting:
                if self._ended.is_set():
                    return
                cutting.cut(self.host.address)
            if self._over(_CUTS):
                return

    def _over(self, seconds: float) -> bool:
        """Waits; returns whether nobody needs this any more."""
        return self._ended.wait(seconds) or current() is not self.token


def current() -> Any:
    """Returns the connection there is, or by what this process joined others."""
    return _tf.connection() or _tf.joined_server()


def begin(hosts: Sequence[description.Host], token: Any, heartbeat: float) -> None:
    """Watches over the hosts of a connection, until that is closed or replaced.

    Args:
        hosts: In the order of their tasks.
        token: The connection, as `_tf.connection` returns it.
        heartbeat: Seconds that one may be silent.
    """
    beside = Lifeline(hosts, heartbeat)
    for task, host in enumerate(hosts):
        Watcher(host, task, token, heartbeat, beside).start()


def watchers() -> list[Watcher]:
    """Returns those of the connection there is, by task.

    There are none unless `connect` made it. In between-graph mode they watch over the
    other processes.
    """
    token = current()
    if token is None:
        return []
    found = [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, Watcher) and thread.token is token
    ]
    return sorted(found, key=lambda watcher: watcher.task)
