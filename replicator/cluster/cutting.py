# SPDX-License-Identifier: Apache-2.0
"""This process's own connections to a host, and their end."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import socket
import struct

from replicator.cluster import addresses

_DESCRIPTORS = "/dev/fd"  # Linux and macOS list there what a process has open
# Linux lists connections there. In these columns are the address of the other side, in
# words of the machine's byte order, the state, and the inode; sockets that are still
# connecting (SYN_SENT) name the other side nowhere else.
_TABLES = (("/proc/self/net/tcp", 4), ("/proc/self/net/tcp6", 16))
_REMOTE, _STATE, _INODE = 2, 3, 9
_CONNECTING = "02"
_TO_TEXT = {4: ipaddress.IPv4Address, 16: ipaddress.IPv6Address}


def cut(address: str) -> int:
    """Shuts down all connections of this process to an address; returns how many.

    Args:
        address: "host:port".
    """
    found = connections(address)
    for connection in found:
        with connection, contextlib.suppress(OSError):  # it has ended by itself
            connection.shutdown(socket.SHUT_RDWR)
    return len(found)


def connections(address: str) -> list[socket.socket]:
    """Returns copies of all connections of this process to an address.

    Those that are still being made are among them: a packet that is lost has gRPC wait
    for 20 seconds.

    Args:
        address: "host:port".
    """
    host, port = addresses.split(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        names = os.listdir(_DESCRIPTORS)
    except OSError:  # nobody knows its name, or a system without such a list
        return []
    peers = {_peer(info[4]) for info in found}
    connecting = _connecting(peers)
    copies: dict[int, socket.socket] = {}
    for descriptor in map(int, names):
        # The listing has its own descriptor, which is a copy's by now.
        if descriptor in copies:
            continue
        made = _copy_if(descriptor, peers, connecting)
        if made is not None:
            copies[made.fileno()] = made
    return list(copies.values())


def _copy_if(
    descriptor: int, peers: set[tuple[str, int]], connecting: set[int]
) -> socket.socket | None:
    """Returns a copy of a descriptor if it is a connection to one of these.

    Args:
        descriptor: A file descriptor.
        peers: Addresses and ports.
        connecting: The inodes of sockets that are about to be such a connection.
    """
    try:
        # A copy, so that it cannot become another file's meanwhile.
        copied = os.dup(descriptor)
    except OSError:  # it is closed by now
        return None
    try:
        connection = socket.socket(fileno=copied)
    except OSError:  # it is no socket
        os.close(copied)
        return None
    try:
        if os.fstat(copied).st_ino in connecting:
            return connection
        if _peer(connection.getpeername()) in peers:
            return connection
    except (OSError, ValueError, TypeError, IndexError):  # not connected, or not by IP
        pass
    connection.close()
    return None


def _connecting(peers: set[tuple[str, int]]) -> set[int]:
    """Returns the inodes of sockets that are being connected to one of these."""
    found = set()
    for table, size in _TABLES:
        try:
            rows = pathlib.Path(table).read_text().splitlines()[1:]
        except OSError:  # it is no Linux
            continue
        for row in map(str.split, rows):
            if row[_STATE] == _CONNECTING and _remote(row[_REMOTE], size) in peers:
                found.add(int(row[_INODE]))
    return found


def _remote(text: str, size: int) -> tuple[str, int]:
    """Returns address and port, as Linux's tables have them: "0100007F:1F90"."""
    number, _, port = text.partition(":")
    words = struct.unpack(f">{size // 4}I", bytes.fromhex(number))
    packed = struct.pack(f"={size // 4}I", *words)
    return _peer((str(_TO_TEXT[size](packed)), int(port, 16)))


def _peer(name: tuple[object, ...]) -> tuple[str, int]:
    """Returns address and port; an IPv4 address is the same by way of IPv6."""
    number = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)
    port = name[1]
    if not isinstance(port, int):
        raise TypeError
    return str(mapped or number), port
