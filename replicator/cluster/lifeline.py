# SPDX-License-Identifier: Apache-2.0
"""A helper process that ends another process's connections to silent hosts.

TensorFlow waits for an answer for as long as a connection lasts, and sometimes holds
Python's lock meanwhile, so that no thread can help. This process receives the other's
connections (file descriptors, through a socket that is its standard input), probes the
hosts at intervals, and shuts down the connections to a silent one. TensorFlow's call
then ends as if the other side had died. No public API does that: cancelling a call
sends another to the same host, and waits for it.

The file is run by its path and uses only the standard library, so that the helper does
not load TensorFlow.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time

# A client's part of an HTTP/2 handshake: the preface and an empty SETTINGS frame.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4  # the type of a frame, its fourth byte
_HEADER = struct.Struct("!I")  # of a message: the number of a host
_MOST = 200  # connections to one host
_CUTS = 0.1  # seconds between cuts while a host is silent: TensorFlow reconnects
_CUTS_AT_ONCE = 10  # cuts between two probes

SILENT = "accepts connections but does not answer: its process is stopped or hangs"


def ask(host: str, port: int, limit: float, stay: float = 0.0) -> str | None:
    """Returns what is wrong with a server; None if it answers.

    gRPC answers the first bytes of HTTP/2 with its settings. A host that is cut off
    accepts no connection; a stopped process accepts one but stays silent. If this
    process itself was stopped meanwhile, it reads the answer that has arrived by then.

    Args:
        host: The server's host.
        port: The server's port.
        limit: Timeout in seconds, for the connection and for the answer each.
        stay: How many seconds to hold the connection after an answer; it ends sooner if
            the other side closes it, as it does when its process ends.
    """
    try:
        with socket.create_connection((host, port), timeout=limit) as peer:
            peer.sendall(_HELLO)
            try:
                answer = peer.recv(9)
            except TimeoutError:
                return SILENT
            if not answer and _is_cut(peer):
                return SILENT
            if stay:
                _hold(peer, stay)
    except socket.gaierror as error:
        return f"its name cannot be resolved ({error.strerror})"
    except TimeoutError:
        return f"no answer within {limit:g} s"
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    if len(answer) < 4 or answer[3] != _SETTINGS:
        return "something listens there, but not a TensorFlow server"
    return None


def _hold(peer: socket.socket, seconds: float) -> None:
    """Holds a connection for `seconds`, or until the other side ends it."""
    deadline = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while (remaining := deadline - time.monotonic()) > 0:
            peer.settimeout(remaining)
            if not peer.recv(4096):
                return


def _is_cut(peer: socket.socket) -> bool:
    """Whether this side has ended a connection, as the watch does to silent hosts."""
    try:
        peer.send(b"\0")
    except BrokenPipeError:
        return True
    return False


def hand_over(control: socket.socket, number: int, descriptors: list[int]) -> None:
    """Sends the helper all connections to a host, to replace those that it holds.

    Args:
        control: The other end of the helper's standard input.
        number: The number of the host.
        descriptors: The file descriptors of the connections.
    """
    with contextlib.suppress(OSError):  # the helper has ended, with this process
        socket.send_fds(control, [_HEADER.pack(number)], descriptors[:_MOST])


class _Lifeline:
    """Monitors one host and cuts the connections to it while it is silent.

    Args:
        host: The server's host.
        port: The server's port.
        pause: Seconds between two probes.
        limit: Timeout of a probe in seconds.
    """

    def __init__(self, host: str, port: int, pause: float, limit: float) -> None:
        self._host, self._port, self._pause, self._limit = host, port, pause, limit
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []

    def replace(self, descriptors: list[int]) -> None:
        """Takes over new connections and closes the previous ones."""
        new_connections = [socket.socket(fileno=d) for d in descriptors]
        with self._lock:
            old_connections, self._connections = self._connections, new_connections
        for connection in old_connections:
            connection.close()

    def run(self) -> None:
        """Probes the host forever."""
        while True:
            time.sleep(self._pause)
            if ask(self._host, self._port, self._limit) is not None:
                for _ in range(_CUTS_AT_ONCE):
                    self._cut()
                    time.sleep(_CUTS)
                    if ask(self._host, self._port, _CUTS) is None:
                        break  # what the host does from now on must not be cut

    def _cut(self) -> None:
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def main(text: str) -> None:
    """Monitors hosts until standard input closes.

    Args:
        text: JSON: `hosts`, [host, port] each; `pause` and `limit`, in seconds.
    """
    facts = json.loads(text)
    lifelines = [
        _Lifeline(host, port, facts["pause"], facts["limit"])
        for host, port in facts["hosts"]
    ]
    for lifeline in lifelines:
        threading.Thread(target=lifeline.run, daemon=True).start()
    control = socket.socket(fileno=0)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _HEADER.size, _MOST)
        if len(data) < _HEADER.size:
            os._exit(0)
        lifelines[_HEADER.unpack(data)[0]].replace(descriptors)


if __name__ == "__main__":
    main(sys.argv[1])
