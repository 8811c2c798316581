"""This process's own connections to a host, and their end."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket

from replicator.cluster import addresses

_DESCRIPTORS = "/dev/fd"  # Linux and macOS list there what a process has open


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
    copies: dict[int, socket.socket] = {}
    for descriptor in map(int, names):
        # The listing has its own descriptor, which is a copy's by now.
        if descriptor not in copies and (made := _copy_if(descriptor, peers)):
            copies[made.fileno()] = made
    return list(copies.values())


def _copy_if(descriptor: int, peers: set[tuple[str, int]]) -> socket.socket | None:
    """Returns a copy of a descriptor if it is a connection to one of these."""
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
        if _peer(connection.getpeername()) in peers:
            return connection
    except (OSError, ValueError, TypeError, IndexError):  # not connected, or not by IP
        pass
    connection.close()
    return None


def _peer(name: tuple[object, ...]) -> tuple[str, int]:
    """Returns address and port; an IPv4 address is the same by way of IPv6."""
    number = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)
    port = name[1]
    if not isinstance(port, int):
        raise TypeError
    return str(mapped or number), port
