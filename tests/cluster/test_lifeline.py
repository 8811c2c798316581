# SPDX-License-Identifier: Apache-2.0
"""The process that shuts connections down while this one holds Python's lock."""

from __future__ import annotations

import ctypes
import socket
import threading
import time

import pytest

from replicator.cluster import description, lifeline, watch

_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@pytest.fixture
def listener():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def _host(server):
    return description.Host("host-b", f"127.0.0.1:{server.getsockname()[1]}")


def test_frees_a_process_that_holds_the_lock(listener):
    """As in TensorFlow's copies of tensors to a host that is stopped."""
    host = _host(listener)  # it listens and accepts nothing: a stopped process
    beside = watch.Lifeline([host], 1.0)
    with socket.create_connection(listener.getsockname()) as connection:
        beside.hand_over(0, host.address)
        began = time.monotonic()
        waits = ctypes.PyDLL(None).recv  # a PyDLL holds the lock during calls
        assert waits(connection.fileno(), ctypes.create_string_buffer(1), 1, 0) == 0
        assert 0.5 < time.monotonic() - began < 20
    beside.release()


def test_a_host_that_answers_is_left_alone(listener):
    def answer():
        while True:
            try:
                connections.append(listener.accept()[0])
                connections[-1].sendall(_SETTINGS)
            except OSError:
                return

    connections: list[socket.socket] = []
    threading.Thread(target=answer, daemon=True).start()
    host = _host(listener)
    beside = watch.Lifeline([host], 0.5)
    with socket.create_connection(listener.getsockname()) as connection:
        assert connection.recv(9) == _SETTINGS
        beside.hand_over(0, host.address)
        connection.settimeout(2.0)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert len(connections) > 2  # it was asked
    beside.release()


def test_holds_no_connection_that_is_no_more(listener):
    """The other side must see a connection end when this process closes it."""
    beside = watch.Lifeline([_host(listener)], 1000.0)
    connection = socket.create_connection(listener.getsockname())
    with listener.accept()[0] as peer:
        beside.hand_over(0, _host(listener).address)
        connection.close()
        beside.hand_over(0, _host(listener).address)
        peer.settimeout(20)
        assert peer.recv(1) == b""
    beside.release()


def test_ends_with_its_users(listener):
    beside = watch.Lifeline([_host(listener), _host(listener)], 1000.0)
    beside.release()
    assert beside._process.poll() is None
    beside.release()
    assert beside._process.returncode == 0
    beside.hand_over(0, _host(listener).address)  # too late, and no error


def test_needs_nothing_but_python():
    code = compile(open(lifeline.__file__).read(), lifeline.__file__, "exec")
    names: dict[str, object] = {"__name__": "alone"}
    exec(code, names)
    modules = {getattr(value, "__name__", "") for value in names.values()}
    assert not any(name.startswith(("tensorflow", "replicator")) for name in modules)
