# SPDX-License-Identifier: Apache-2.0
"""Connections to an address are cut, and no others."""

from __future__ import annotations

import os
import select
import socket
import sys

import pytest

from replicator.cluster import cutting
from tests.cluster import servers


def _accepted(server: socket.socket, address: tuple[str, int]):
    connection = socket.create_connection(address)
    return connection, server.accept()[0]


def test_only_connections_to_the_address_are_cut():
    with (
        socket.create_server(("127.0.0.1", 0)) as cut,
        socket.create_server(("127.0.0.1", 0)) as other_server,
    ):
        first = _accepted(cut, cut.getsockname())
        second = _accepted(cut, cut.getsockname())
        other = _accepted(other_server, other_server.getsockname())
        assert cutting.cut(f"127.0.0.1:{cut.getsockname()[1]}") == 2
        for connection, peer in (first, second):
            peer.settimeout(5)
            assert connection.recv(1) == peer.recv(1) == b""
        other[0].sendall(b"x")
        assert other[1].recv(1) == b"x"
        for connection in (*first, *second, *other):
            connection.close()


def test_an_address_by_ipv6_is_the_same():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.socket(socket.AF_INET6) as connection:
            try:
                connection.connect(("::ffff:127.0.0.1", port))
            except OSError as error:
                pytest.skip(f"there is no IPv6: {error}")
            assert cutting.cut(f"localhost:{port}") == 1
            assert connection.recv(1) == b""


@pytest.mark.skipif(sys.platform != "linux", reason="others do not list them")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_that_are_being_made_are_cut(host):
    with servers.unanswered(host) as (waiting, address):
        cutting.cut(address)
        readable, _, _ = select.select([waiting], [], [], 10)
        assert readable


def test_nothing_stays_open():
    before = len(os.listdir("/dev/fd"))
    for _ in range(5):
        assert cutting.cut("127.0.0.1:1") == 0
        assert cutting.cut("no-such-host.invalid:1") == 0
    assert len(os.listdir("/dev/fd")) == before
