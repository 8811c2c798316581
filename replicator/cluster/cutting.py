# SPDX-License-Identifier: Apache-2.0
"""Finds and shuts down this process's connections to a host."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import socket
import struct

from replicator.cluster import addresses

_DESCRIPTORS = "/dev/fd"  # where Linux and macOS list a process's open files
# Linux's tables of connections, and the bytes of their addresses. The columns hold the
# address of the other side, in words of the machine's byte order, the state and the
# inode. Nothing else names the other side of a socket that is connecting (SYN_SENT).
_TABLES = (("/proc/self/net/tcp", 4), ("/proc/self/net/tcp6", 16))
_REMOTE, _STATE, _INODE = 2, 3, 9
_CONNECTING = "02"
_TO_TEXT = {4: ipaddress.IPv4Address, 16: ipaddress.IPv6Address}


def cut(address: str) -> int:
    """Shuts down all connections of this process to an address; returns how many.

    Args:
        address: "host:port".
    """
    copies = connections(address)
    for connection in copies:
        with connection, contextlib.suppress(OSError):  # it has ended by itself
            connection.shutdown(socket.SHUT_RDWR)
    return len(copies)


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
    """Returns the inodes of sockets that are connecting to one of the peers."""
    inodes = set()
    for table, size in _TABLES:
        try:
            rows = pathlib.Path(table).read_text().splitlines()[1:]
        except OSError:  # not Linux
            continue
        for row in map(str.split, rows):
            if row[_STATE] == _CONNECTING and _remote(row[_REMOTE], size) in peers:
                inodes.add(int(row[_INODE]))
    return inodes


def _remote(text: str, size: int) -> tuple[str, int]:
    """Parses an address and port of Linux's tables, such as "0100007F:1F90"."""
    number, _, port = text.partition(":")
    words = struct.unpack(f">{size // 4}I", bytes.fromhex(number))
    packed = struct.pack(f"={size // 4}I", *words)
    return _peer((str(_TO_TEXT[size](packed)), int(port, 16)))


def _peer(name: tuple[object, ...]) -> tuple[str, int]:
    """Returns address and port, with an IPv4-mapped IPv6 address as IPv4."""
    number = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)
    port = name[1]
    if not isinstance(port, int):
        raise TypeError
    return str(mapped or number), port
