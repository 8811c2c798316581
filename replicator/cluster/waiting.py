"""Whether servers are there: asks them over TCP, before TensorFlow would wait for ever.

TensorFlow's own connecting has no time limit: where a host does not answer, it never
returns. So each is asked first, by the first bytes of HTTP/2, which gRPC speaks:
whoever answers with settings listens and is not stopped.
"""

from __future__ import annotations

import concurrent.futures
import socket
import time
from collections.abc import Callable, Mapping, Sequence

from replicator.cluster import addresses

# A client's part of an HTTP/2 handshake: the preface and an empty SETTINGS frame.
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_SETTINGS = 4  # the type of a frame, its fourth byte
_MOST_AT_ONCE = 64
_PAUSE = 0.2  # seconds between two rounds
_PROGRESS = 5.0  # seconds between two lines

SILENT = "accepts connections but does not answer: its process is stopped or hangs"


def ask(address: str, limit: float) -> str | None:
    """Returns what is wrong with a server, None if it answers.

    Args:
        address: "host:port".
        limit: Seconds that it may take.
    """
    host, port = addresses.split(address)
    until = time.monotonic() + limit
    try:
        with socket.create_connection((host, port or 0), timeout=limit) as peer:
            peer.sendall(_HELLO)
            peer.settimeout(max(0.01, until - time.monotonic()))
            try:
                answer = peer.recv(9)
            except TimeoutError:
                return SILENT
            if not answer and _is_cut(peer):
                return SILENT
    except socket.gaierror as error:
        return f"nobody knows its name ({error.strerror})"
    except TimeoutError:
        return f"no answer within {limit:g} s"
    except OSError as error:
        return (error.strerror or type(error).__name__).lower()
    if len(answer) < 4 or answer[3] != _SETTINGS:
        return "something listens there, but no TensorFlow server"
    return None


def _is_cut(peer: socket.socket) -> bool:
    """Whether this side has ended a connection: the watch does, to silent hosts."""
    try:
        peer.send(b"\0")
    except BrokenPipeError:
        return True
    return False


def ask_all(asked: Sequence[str], limit: float) -> dict[str, str]:
    """Returns what is wrong with each server that does not answer.

    Args:
        asked: Addresses, "host:port".
        limit: Seconds that each may take.
    """
    if not asked:
        return {}
    with concurrent.futures.ThreadPoolExecutor(min(len(asked), _MOST_AT_ONCE)) as pool:
        answers = pool.map(lambda address: ask(address, limit), asked)
        found = zip(asked, answers, strict=True)
    return {address: problem for address, problem in found if problem is not None}


def wait_for(
    asked: Sequence[str],
    limit: float,
    silence: float,
    progress: Callable[[Mapping[str, str], float], None],
) -> dict[str, str]:
    """Waits until all servers answer; returns what is wrong with those that do not.

    Args:
        asked: Addresses, "host:port".
        limit: Seconds in all.
        silence: Seconds that one may take to answer.
        progress: Called now and then with what is wrong with those that are missing,
            and the seconds that have passed.
    """
    began = told = time.monotonic()
    left = list(asked)
    while True:
        remaining = began + limit - time.monotonic()
        problems = ask_all(left, max(0.05, min(silence, remaining)))
        left = list(problems)
        now = time.monotonic()
        if not left or now - began >= limit:
            return problems
        if now - told >= _PROGRESS:
            told = now
            progress(problems, now - began)
        time.sleep(min(_PAUSE, max(0.0, began + limit - now)))
