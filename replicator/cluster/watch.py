"""Watches over the hosts of a connection, and frees what waits for a silent one.

A thread for each host asks its server now and then, by the first bytes of HTTP/2, which
a process that is stopped does not answer, nor one behind a link that is cut. As long as
it does not, this process's connections to it are shut down, so that a step that waits
for it fails, and so does the next.

Which threads there are says Python itself, so nothing is kept here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from replicator import _tf
from replicator.cluster import cutting, description, waiting

# Parts of the heartbeat: between two questions, and for the answer to one. Together
# they leave time to free the step and to name the host.
_PAUSE, _ANSWER = 0.2, 0.5
_CUTS = 0.1  # seconds between two cuts while a host is silent: TensorFlow tries again
_CUTS_AT_ONCE = 10  # between two questions


class Watcher(threading.Thread):
    """Watches over one host, as long as its connection is the one there is.

    Args:
        host: The host.
        task: Its number in the connection.
        token: The connection, as `_tf.connection` returns it.
        heartbeat: Seconds that it may be silent.

    Attributes:
        problem: What is wrong with it now, or None.
        last: What was wrong with it last, or None.
    """

    def __init__(
        self, host: description.Host, task: int, token: Any, heartbeat: float
    ) -> None:
        super().__init__(name=f"replicator watches {host.name}", daemon=True)
        self.host, self.task, self.token = host, task, token
        self._heartbeat = heartbeat
        self._ended = threading.Event()
        self.problem: str | None = None
        self.last: str | None = None

    def run(self) -> None:
        """Asks, until the connection is closed or replaced."""
        while not self._over(_PAUSE * self._heartbeat):
            problem = waiting.ask(self.host.address, _ANSWER * self._heartbeat)
            self.problem = problem
            if problem is not None:
                self.last = problem
                self._free()

    def end(self) -> None:
        """Has it end soon."""
        self._ended.set()

    def _free(self) -> None:
        for _ in range(_CUTS_AT_ONCE):
            cutting.cut(self.host.address)
            if self._over(_CUTS):
                return

    def _over(self, seconds: float) -> bool:
        """Waits; returns whether nobody needs this any more."""
        return self._ended.wait(seconds) or _tf.connection() is not self.token


def begin(hosts: Sequence[description.Host], token: Any, heartbeat: float) -> None:
    """Watches over the hosts of a connection, until that is closed or replaced.

    Args:
        hosts: In the order of their tasks.
        token: The connection, as `_tf.connection` returns it.
        heartbeat: Seconds that one may be silent.
    """
    for task, host in enumerate(hosts):
        Watcher(host, task, token, heartbeat).start()


def watchers() -> list[Watcher]:
    """Returns those of the connection, by task; none unless `connect` made it."""
    token = _tf.connection()
    if token is None:
        return []
    found = [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, Watcher) and thread.token is token
    ]
    return sorted(found, key=lambda watcher: watcher.task)
