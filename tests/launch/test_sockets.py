# SPDX-License-Identifier: Apache-2.0
"""The kernel's tables name sockets, their ends and their owners."""

from __future__ import annotations

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from replicator.launch import sockets

_ROW = (
    "   1: {local} {remote} 01 00000000:00000000 00:00000000 00000000  1000        0 "
    "{inode} 1 0000000000000000 20 4 30 10 -1"
)


def _row(local: str, remote: str, inode: int = 7) -> sockets.SocketRow:
    words = _ROW.format(local=local, remote=remote, inode=inode).split()
    return sockets.SocketRow(tuple(words), 4 if len(local) == 13 else 16)


@pytest.mark.skipif(sys.byteorder != "little", reason="written there")
def test_rows_are_parsed() -> None:
    row = _row("0100007F:1F90", "0200000A:0016")
    assert row.local == ("127.0.0.1", 8080)
    assert row.remote == ("10.0.0.2", 22)
    assert (row.state, row.owner, row.inode) == ("01", 1000, 7)
    mapped = _row(
        "0000000000000000FFFF00000100007F:1F90", "000080FE000000000000000001000000:0016"
    )
    assert mapped.local == ("127.0.0.1", 8080)
    assert mapped.remote == ("fe80::1", 22)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_connection_has_an_owner_while_it_is_open(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        remote = server.getsockname()[:2]
        connection = socket.create_connection(remote)
        local = connection.getsockname()[:2]
        assert sockets.owner(local, remote) == os.geteuid()
        assert sockets.owner((address, 1), remote) is None
        connection.shutdown(socket.SHUT_WR)  # still open
        assert sockets.owner(local, remote) == os.geteuid()
        connection.close()  # the kernel keeps it, as root's, until the other side ends
        assert sockets.owner(local, remote) is None


def test_mapped_addresses_are_the_same() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.socket(socket.AF_INET6) as connection:
            connection.connect(("::ffff:127.0.0.1", port))
            local = "127.0.0.1", connection.getsockname()[1]
            assert sockets.owner(local, ("127.0.0.1", port)) == os.geteuid()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has other users' processes")
def test_another_users_connection_is_theirs() -> None:
    program = (
        "import encodings.idna, os, socket, sys; os.setuid(65534); "
        "socket.create_connection(('127.0.0.1', int(sys.argv[1]))).recv(1)"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        remote = server.getsockname()
        command = [sys.executable, "-I", "-S", "-c", program, str(remote[1])]
        with subprocess.Popen(command) as stranger:
            connection, local = server.accept()
            assert sockets.owner(local, remote) == 65534
            connection.close()
            assert stranger.wait() == 0


def test_what_no_process_holds_has_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _row("0100007F:1F90", "0100007F:0016", inode=0)
    monkeypatch.setattr(sockets, "rows", lambda: iter([row]))
    assert sockets.owner(row.local, row.remote) is None


def test_a_socket_that_is_closed_while_it_is_looked_up_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    open_row = _row("0100007F:1F90", "0100007F:0016")
    looks = iter([[open_row], []])
    monkeypatch.setattr(sockets, "rows", lambda: iter(next(looks)))
    assert sockets.owner(open_row.local, open_row.remote) is None


def test_systems_without_tables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(sockets, "_TABLES", ((str(tmp_path / "none"), 4),))
    assert not list(sockets.rows())
