# SPDX-License-Identifier: Apache-2.0
"""Monitors the hosts of a connection, and unblocks calls that wait for a silent one.

One thread per host probes its server at intervals with the first bytes of HTTP/2, which
a stopped process, or one behind a cut link, does not answer. While a host is silent,
its thread shuts down this process's connections to it, so that a step that waits for
it fails, and so does the next. Where TensorFlow waits with Python's lock held, a helper
process does this instead (lifeline.py).

This module keeps no state: the threads are found through `threading.enumerate`.
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

from replicator._tf import cluster
from replicator.cluster import addresses, cutting, description, lifeline, waiting

# Fractions of the heartbeat: between two probes, and for the answer to one. Together
# they leave time to unblock the step and to name the host.
_PAUSE, _ANSWER = 0.15, 0.4
_CUTS = 0.1  # seconds between cuts while a host is silent: TensorFlow reconnects
_CUTS_AT_ONCE = 10  # cuts between two probes
_OTHERS_AT = 3  # the cut before which calls to the other hosts are ended, too


class Lifeline:
    """A helper process that shuts down connections to silent hosts.

    It ends with this process.

    Args:
        hosts: The hosts.
        heartbeat: How many seconds a host may be silent.
    """

    def __init__(self, hosts: Sequence[description.Host], heartbeat: float) -> None:
        facts = {
            "hosts": [addresses.split(host.address) for host in hosts],
            "pause": _PAUSE * heartbeat,
            "limit": _ANSWER * heartbeat,
        }
        self._control, remote = socket.socketpair()
        self._users, self._lock = len(hosts), threading.Lock()
        with remote:
            self._process = subprocess.Popen(
                [sys.executable, "-I", lifeline.__file__, json.dumps(facts)],
                stdin=remote.fileno(),
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # no terminal's Ctrl-C reaches it
            )

    def hand_over(self, task: int, address: str) -> None:
        """Passes this process's connections to a host to the helper.

        Args:
            task: The host's number.
            address: The host's address.
        """
        with contextlib.ExitStack() as stack:
            copies = [stack.enter_context(c) for c in cutting.connections(address)]
            descriptors = [connection.fileno() for connection in copies]
            lifeline.hand_over(self._control, task, descriptors)

    def end(self) -> None:
        """Kills the helper, so that it shuts nothing else down."""
        self._process.kill()

    def release(self) -> None:
        """Ends the helper once the watchers of all hosts have called this."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._control.close()
                self._process.wait()


class Watcher(threading.Thread):
    """Monitors one host for as long as the connection to it is the current one.

    Args:
        host: The host.
        task: Its number in the connection.
        token: The connection, as `_tf.cluster.connection` returns it.
        heartbeat: How many seconds the host may be silent.
        lifeline: The helper process for when no thread can run, or None.

    Attributes:
        problem: What is wrong with the host now, or None.
        last: The last problem of the host, or None.
    """

    def __init__(
        self,
        host: description.Host,
        task: int,
        token: Any,
        heartbeat: float,
        lifeline: Lifeline | None = None,
    ) -> None:
        super().__init__(name=f"replicator watches {host.name}", daemon=True)
        self.host, self.task, self.token = host, task, token
        self._heartbeat, self._lifeline = heartbeat, lifeline
        self._ended, self._cutting = threading.Event(), threading.Lock()
        self.problem: str | None = None
        self.last: str | None = None

    def run(self) -> None:
        """Probes the host until the connection is closed or replaced."""
        try:
            self._watch()
        finally:
            if self._lifeline is not None:
                self._lifeline.release()

    def end(self) -> None:
        """Makes the watcher end soon, and keeps it from shutting anything down.

        The next connection may be to a host that was silent a moment ago.
        """
        with self._cutting:
            self._ended.set()
        if self._lifeline is not None:
            self._lifeline.end()

    def _watch(self) -> None:
        while True:
            if self._lifeline is not None:
                self._lifeline.hand_over(self.task, self.host.address)
            if self._over(_PAUSE * self._heartbeat):
                return
            problem = waiting.ask(self.host.address, _ANSWER * self._heartbeat)
            self.problem = problem
            if problem is not None:
                self.last = problem
                self._free()

    def _free(self) -> None:
        for k in range(_CUTS_AT_ONCE):
            with self._cutting:
                if self._ended.is_set():
                    return
                cutting.cut(self.host.address)
                if k == _OTHERS_AT:
                    _free_others()
            if self._over(_CUTS) or waiting.ask(self.host.address, _CUTS) is None:
                return  # what the host does from now on must not be cut

    def _over(self, seconds: float) -> bool:
        """Waits; returns whether the watcher is no longer needed."""
        return self._ended.wait(seconds) or current() is not self.token


def _free_others() -> None:
    """Ends calls to the hosts that answer, which may wait for a tensor from another.

    Nothing else ends them: such a transfer uses no connection of this process. In
    between-graph mode every process has its own watch.
    """
    if cluster.connection() is not None:
        for watcher in watchers():
            if watcher.problem is None:
                cutting.cut(watcher.host.address, probes=False)


def current() -> Any:
    """Returns the current connection, or the server by which this process joined."""
    return cluster.connection() or cluster.joined_server()


def begin(hosts: Sequence[description.Host], token: Any, heartbeat: float) -> None:
    """Starts monitoring hosts, until their connection is closed or replaced.

    Args:
        hosts: The hosts of the connection, in task order.
        token: The connection, as `_tf.cluster.connection` returns it.
        heartbeat: How many seconds a host may be silent.
    """
    helper = Lifeline(hosts, heartbeat)
    for task, host in enumerate(hosts):
        Watcher(host, task, token, heartbeat, helper).start()


def watchers() -> list[Watcher]:
    """Returns the watchers of the current connection, in task order.

    There are none unless `connect` made the connection. In between-graph mode they
    monitor the other processes.
    """
    token = current()
    if token is None:
        return []
    threads = [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, Watcher) and thread.token is token
    ]
    return sorted(threads, key=lambda watcher: watcher.task)
