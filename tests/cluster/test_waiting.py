# SPDX-License-Identifier: Apache-2.0
"""A missing server is detected in time, whatever else listens there."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from replicator.cluster import addresses, waiting


@contextlib.contextmanager
def _listener(answer=None):
    """Listens; answers each connection with some bytes, or never."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if answer is not None:
            threading.Thread(target=_answer, args=(server, answer), daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


def _answer(server, answer):
    with contextlib.suppress(OSError):
        while True:
            with server.accept()[0] as peer:
                peer.recv(100)
                peer.sendall(answer)


_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def test_a_server_of_grpc_answers():
    with _listener(_SETTINGS) as address:
        assert waiting.ask(address, 5.0) is None


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n", b""])
def test_another_server_is_none(answer):
    with _listener(answer) as address:
        assert waiting.ask(address, 5.0) == (
            "something listens there, but not a TensorFlow server"
        )


def test_a_stopped_server_is_silent():
    with _listener() as address:
        began = time.monotonic()
        assert waiting.ask(address, 0.3) == waiting.SILENT
        assert time.monotonic() - began < 5


def test_nobody():
    assert waiting.ask(f"127.0.0.1:{addresses.free_port()}", 5.0) == (
        "connection refused"
    )
    assert "its name cannot be resolved" in waiting.ask("no-such-host.invalid:1", 5.0)


def test_all_are_asked_at_once():
    with _listener() as silent, _listener(_SETTINGS) as there:
        closed = f"127.0.0.1:{addresses.free_port()}"
        began = time.monotonic()
        actual = waiting.ask_all([silent, there, closed], 0.5)
        assert time.monotonic() - began < 5
    assert actual == {silent: waiting.SILENT, closed: "connection refused"}
    assert waiting.ask_all([], 1.0) == {}


def test_who_comes_late_is_waited_for():
    port = addresses.free_port()
    with contextlib.ExitStack() as stack:

        def come():
            server = stack.enter_context(socket.create_server(("127.0.0.1", port)))
            _answer(server, _SETTINGS)

        timer = threading.Timer(0.5, come)
        timer.daemon = True  # closing a socket wakes no thread that waits for it
        timer.start()
        address = f"127.0.0.1:{port}"
        assert waiting.wait_for([address], 30.0, 5.0, lambda *_: None) == {}


def test_waiting_ends_and_says_what_it_waits_for(monkeypatch):
    monkeypatch.setattr(waiting, "_PROGRESS", 0.2)
    address, lines = f"127.0.0.1:{addresses.free_port()}", []
    actual = waiting.wait_for([address], 1.0, 5.0, lambda *line: lines.append(line))
    assert actual == {address: "connection refused"}
    assert all(problems == actual for problems, _ in lines)
    assert [0.2 <= passed <= 1.0 for _, passed in lines] == [True] * len(lines)
    assert lines
