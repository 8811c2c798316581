# SPDX-License-Identifier: Apache-2.0
"""The watch over a host, which is a socket that answers or does not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest

from replicator.cluster import description, watch

_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HEARTBEAT = 0.5


class _Server:
    """Answers like gRPC, unless it is told to be silent."""

    def __init__(self):
        self.silent = False
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.kept = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                peer = self.socket.accept()[0]
                self.kept.append(peer)
                with contextlib.suppress(OSError):
                    if not self.silent:
                        peer.sendall(_SETTINGS)


@pytest.fixture
def server():
    new_server = _Server()
    yield new_server
    new_server.socket.close()


@pytest.fixture
def watcher(server):
    host = description.Host("host-b", server.address)
    watcher = watch.Watcher(host, 0, None, _HEARTBEAT)  # None: nothing is connected
    watcher.start()
    yield watcher
    watcher.end()
    watcher.join(10)
    assert not watcher.is_alive()


def _until(condition, seconds=20):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_host_that_answers_is_left_alone(server, watcher):
    with socket.create_connection(server.socket.getsockname()) as connection:
        connection.settimeout(2.5 * _HEARTBEAT)
        assert connection.recv(100) == _SETTINGS
        with pytest.raises(TimeoutError):
            connection.recv(1)
    assert watcher.problem is watcher.last is None


def test_a_silent_host_is_named_and_cut_off_until_it_answers(server, watcher):
    with socket.create_connection(server.socket.getsockname()) as connection:
        assert connection.recv(100) == _SETTINGS
        server.silent = True
        connection.settimeout(20)
        assert connection.recv(1) == b""  # else TimeoutError
    _until(lambda: watcher.problem is not None)
    assert "does not answer" in watcher.problem
    server.silent = False
    _until(lambda: watcher.problem is None)
    assert "does not answer" in watcher.last


def test_a_host_that_answers_again_is_not_cut_off(server, watcher):
    server.silent = True
    _until(lambda: watcher.problem is not None)  # it would cut ten times from now on
    server.silent = False
    time.sleep(0.3)  # for a cut that began before
    with socket.create_connection(server.socket.getsockname()) as connection:
        connection.settimeout(2.5 * _HEARTBEAT)
        assert connection.recv(100) == _SETTINGS
        with pytest.raises(TimeoutError):
            connection.recv(1)  # b"" if it was cut


def test_calls_to_other_hosts_end_which_may_wait_for_a_silent_one(monkeypatch):
    token = object()
    monkeypatch.setattr(watch.cluster, "connection", lambda: token)
    servers = [_Server(), _Server()]
    watchers = [
        watch.Watcher(description.Host(str(k), s.address), k, token, _HEARTBEAT)
        for k, s in enumerate(servers)
    ]
    call, probe = (
        socket.create_connection(servers[0].socket.getsockname()) for _ in "ab"
    )
    call.setsockopt(socket.SOL_TCP, socket.TCP_NODELAY, 1)  # as gRPC does
    for connection in (call, probe):
        connection.settimeout(20)
        assert connection.recv(100) == _SETTINGS
    servers[1].silent = True
    for watcher in watchers:
        watcher.start()
    with call, probe:
        assert call.recv(1) == b""  # else TimeoutError
        probe.settimeout(_HEARTBEAT)
        with pytest.raises(TimeoutError):
            probe.recv(1)
    assert watchers[0].problem is watchers[0].last is None
    for watcher, server in zip(watchers, servers, strict=True):
        watcher.end()
        watcher.join(10)
        server.socket.close()


def test_a_host_that_has_gone_is_named(server, watcher):
    server.socket.shutdown(socket.SHUT_RDWR)
    server.socket.close()
    _until(lambda: watcher.problem is not None)
    assert "refused" in watcher.problem


def test_a_watch_ends_with_its_connection(server):
    host = description.Host("host-b", server.address)
    watcher = watch.Watcher(host, 0, object(), 0.1)  # a connection that is over
    watcher.start()
    watcher.join(20)
    assert not watcher.is_alive()


def test_a_watch_that_is_ended_cuts_nothing(server, watcher):
    server.silent = True
    _until(lambda: watcher.problem is not None)  # it would cut ten times from now on
    watcher.end()
    with socket.create_connection(server.socket.getsockname()) as connection:
        connection.settimeout(1.5 * _HEARTBEAT)
        with pytest.raises(TimeoutError):
            connection.recv(1)  # b"" if it was cut


@pytest.mark.parametrize("ended", [False, True])
def test_neither_does_the_process_beside_it(server, ended):
    server.silent = True
    beside = watch.Lifeline([description.Host("host-b", server.address)], _HEARTBEAT)
    with socket.create_connection(server.socket.getsockname()) as connection:
        beside.hand_over(0, server.address)
        if ended:
            beside.end()
        connection.settimeout(2.0 if ended else 20.0)
        if ended:
            with pytest.raises(TimeoutError):
                connection.recv(1)
        else:
            assert connection.recv(1) == b""  # it was cut
    beside.release()


def test_neither_is_it_by_the_process_beside_it(server):
    server.silent = True
    beside = watch.Lifeline([description.Host("host-b", server.address)], _HEARTBEAT)
    with socket.create_connection(server.socket.getsockname()) as connection:
        beside.hand_over(0, server.address)
        connection.settimeout(20.0)
        assert connection.recv(1) == b""  # it was cut
    server.silent = False
    time.sleep(0.3)  # for a cut that began before
    with socket.create_connection(server.socket.getsockname()) as connection:
        beside.hand_over(0, server.address)
        connection.settimeout(2.5 * _HEARTBEAT)
        assert connection.recv(100) == _SETTINGS
        with pytest.raises(TimeoutError):
            connection.recv(1)
    beside.release()


def test_nobody_watches_without_a_connection(watcher):
    assert watcher.is_alive()
    assert watch.watchers() == []
