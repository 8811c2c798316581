"""Ends this process's own connections to a host that is silent.

TensorFlow waits for an answer as long as a connection lasts, and one to a process that
is stopped, or behind a link that is cut, lasts for ever. Once it is shut down on this
side, TensorFlow's call ends as it does when the other side dies. Nothing public does
that: cancelling a call sends another to the same host, and waits for it.
"""

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
    host, port = addresses.split(address)
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        peers = {_peer(info[4]) for info in found}
        return sum(_cut_if(int(name), peers) for name in os.listdir(_DESCRIPTORS))
    return 0


def _cut_if(descriptor: int, peers: set[tuple[str, int]]) -> bool:
    """Shuts a descriptor down if it is a connection to one of these."""
    try:
        # A copy, so that it cannot become another file's meanwhile.
        copied = os.dup(descriptor)
    except OSError:  # it is closed by now
        return False
    try:
        connection = socket.socket(fileno=copied)
    except OSError:  # it is no socket
        os.close(copied)
        return False
    with connection:
        try:
            if _peer(connection.getpeername()) not in peers:
                return False
            connection.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError, TypeError):  # not connected, or of another kind
            return False
    return True


def _peer(name: tuple[object, ...]) -> tuple[str, int]:
    """Returns address and port; an IPv4 address is the same by way of IPv6."""
    number = ipaddress.ip_address(str(name[0]).partition("%")[0])
    mapped = getattr(number, "ipv4_mapped", None)
    port = name[1]
    if not isinstance(port, int):
        raise TypeError
    return str(mapped or number), port
