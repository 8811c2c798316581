# SPDX-License-Identifier: Apache-2.0
"""A process that ends the connections of another to hosts that are silent.

TensorFlow waits for an answer as long as a connection lasts, and now and then holds
Python's lock while it does; so no thread can help. This process is given the other's
connections (file descriptors, through a socket that is its standard input), asks the
hosts now and then, and shuts the connections to a silent one down. TensorFlow's call
ends then, as it does when the other side dies. Nothing public does that: cancelling a
call sends another to the same host, and waits for it.

It is run by its path, so that it needs no TensorFlow: only the standard library is used
here.
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
_CUTS = 0.1  # seconds between two cuts while a host is silent: TensorFlow tries again
_CUTS_AT_ONCE = 10  # between two questions

SILENT = "accepts connections but does not answer: its process is stopped or hangs"


def ask(host: str, port: int, limit: float, stay: float = 0.0) -> str | None:
    """Returns what is wrong with a server, None if it answers.

    gRPC answers the first bytes of HTTP/2 with its settings. Nobody can connect to a
    host that is cut off; to one that is stopped one can, but it says nothing. If this
    process itself is stopped meanwhile, it reads what answer has come by then.

    Args:
        host: Where it is.
        port: Where it listens.
        limit: Seconds that each of these may take.
        stay: For how many seconds to hold the connection then; less if it is ended on
            the other side, as it is when that process is.
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
        return f"nobody knows its name ({error.strerror})"
    except TimeoutError:
        return f"no answer within {limit:g} s"
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    if len(answer) < 4 or answer[3] != _SETTINGS:
        return "something listens there, but no TensorFlow server"
    return None


def _hold(peer: socket.socket, seconds: float) -> None:
    """Holds a connection for so long, or until it is ended on the other side."""
    until = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while (left := until - time.monotonic()) > 0:
            peer.settimeout(left)
            if not peer.recv(4096):
                return


def _is_cut(peer: socket.socket) -> bool:
    """Whether this side has ended a connection: the watch does, to silent hosts."""
    try:
        peer.send(b"\0")
    except BrokenPipeError:
        return True
    return False


def hand_over(control: socket.socket, number: int, descriptors: list[int]) -> None:
    """Gives the process all connections to a host, in place of those it has.

    Args:
        control: The other end of its standard input.
        number: The host's.
        descriptors: The connections'.
    """
    with contextlib.suppress(OSError):  # it has ended, with this process
        socket.send_fds(control, [_HEADER.pack(number)], descriptors[:_MOST])


class _Lifeline:
    """Watches over one host.

    Args:
        host: Where its server is.
        port: Where it listens.
        pause: Seconds between two questions.
        limit: Seconds for the answer.
    """

    def __init__(self, host: str, port: int, pause: float, limit: float) -> None:
        self._host, self._port, self._pause, self._limit = host, port, pause, limit
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []

    def replace(self, descriptors: list[int]) -> None:
        """Takes over the connections that there are now."""
        found = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        with self._lock:
            old, self._connections = self._connections, found
        for connection in old:
            connection.close()

    def run(self) -> None:
        """Asks for ever."""
        while True:
            time.sleep(self._pause)
            if ask(self._host, self._port, self._limit) is not None:
                for _ in range(_CUTS_AT_ONCE):
                    self._cut()
                    time.sleep(_CUTS)

    def _cut(self) -> None:
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def main(text: str) -> None:
    """Watches over hosts until standard input closes.

    Args:
        text: JSON: `hosts`, [host, port] each; `pause` and `limit`, in seconds.
    """
    facts = json.loads(text)
    lines = [
        _Lifeline(host, port, facts["pause"], facts["limit"])
        for host, port in facts["hosts"]
    ]
    for line in lines:
        threading.Thread(target=line.run, daemon=True).start()
    control = socket.socket(fileno=0)
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, _HEADER.size, _MOST)
        if len(data) < _HEADER.size:
            os._exit(0)
        lines[_HEADER.unpack(data)[0]].replace(descriptors)


if __name__ == "__main__":
    main(sys.argv[1])
