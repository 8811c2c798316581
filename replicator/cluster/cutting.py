# SPDX-License-Identifier: Apache-2.0
"""Finds and shuts down this process's connections to a host."""

from __future__ import annotations

import contextlib
import os
import socket

from replicator.cluster import addresses
from replicator.launch import sockets

_DESCRIPTORS = "/dev/fd"  # where Linux and macOS list a process's open files


def cut(address: str, *, probes: bool = True) -> int:
    """Shuts down all connections of this process to an address; returns how many.

    Args:
        address: "host:port".
        probes: Whether to include our own probes of the server, which would report that
            it is lost.
    """
    count = 0
    for connection in connections(address):
        with connection, contextlib.suppress(OSError):  # it has ended by itself
            # Only gRPC sets this option: our probes send one message.
            if probes or connection.getsockopt(socket.SOL_TCP, socket.TCP_NODELAY):
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def connections(address: str) -> list[socket.socket]:
    """Returns duplicates of all connections of this process to an address.

    They include sockets that are still connecting: after a lost packet, gRPC waits for
    20 seconds.

    Args:
        address: "host:port".
    """
    host, port = addresses.split(address)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        names = os.listdir(_DESCRIPTORS)
    except OSError:  # the name is unknown, or the system has no such list
        return []
    peers = {_peer(info[4]) for info in infos}
    connecting = _connecting(peers)
    copies: dict[int, socket.socket] = {}
    for descriptor in map(int, names):
        # The listing includes its own descriptor, which a copy may have taken since.
        if descriptor in copies:
            continue
        copy = _copy_if(descriptor, peers, connecting)
        if copy is not None:
            copies[copy.fileno()] = copy
    return list(copies.values())


def _copy_if(
    descriptor: int, peers: set[tuple[str, int]], connecting: set[int]
) -> socket.socket | None:
    """Returns a duplicate of a descriptor if it is a connection to one of the peers.

    Args:
        descriptor: A file descriptor.
        peers: Addresses and ports.
        connecting: The inodes of sockets that are connecting to one of the peers.
    """
    try:
        # Duplicated first, so that it cannot become another file's meanwhile.
        duplicate = os.dup(descriptor)
    except OSError:  # closed by now
        return None
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:  # not a socket
        os.close(duplicate)
        return None
    try:
        if os.fstat(duplicate).st_ino in connecting:
            return connection
        if _peer(connection.getpeername()) in peers:
            return connection
    except (OSError, ValueError, TypeError, IndexError):  # not connected, or not by IP
        pass
    connection.close()
    return None


def _connecting(peers: set[tuple[str, int]]) -> set[int]:
    """Returns the inodes of sockets that are connecting to one of the peers.

    Nothing but the kernel's tables names the other side of such a socket.
    """
    return {
        row.inode
        for row in sockets.rows()
        if row.state == sockets.CONNECTING and row.remote in peers
    }


def _peer(name: tuple[object, ...]) -> tuple[str, int]:
    """Returns address and port, with an IPv4-mapped IPv6 address as IPv4."""
    port = name[1]
    if not isinstance(port, int):
        raise TypeError
    return sockets.plain(str(name[0])), port
