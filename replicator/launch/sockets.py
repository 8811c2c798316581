# SPDX-License-Identifier: Apache-2.0
"""Linux's tables of TCP sockets: which connections there are, and who owns them.

Uses the standard library only, as all of this package; replicator.cluster reads the
tables, too.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import pathlib
import struct
from collections.abc import Iterator

# The tables, and the bytes of their addresses, which are in words of the machine's byte
# order.
_TABLES = (("/proc/self/net/tcp", 4), ("/proc/self/net/tcp6", 16))
_LOCAL, _REMOTE, _STATE, _OWNER, _INODE = 1, 2, 3, 7, 9  # columns
CONNECTING, LISTENING = "02", "0A"  # states
OPEN = ("01", "03", "08")  # established, being accepted, closed by the other side only
NO_INODE = 0  # the inode of a socket that no process holds (yet, or any longer)

_TO_TEXT = {4: ipaddress.IPv4Address, 16: ipaddress.IPv6Address}
Name = tuple[str, int]  # an address and a port


@dataclasses.dataclass(frozen=True)
class SocketRow:
    """One socket of this network namespace.

    Attributes:
        words: The columns of its row.
        size: The bytes of its addresses.
    """

    words: tuple[str, ...]
    size: int

    @property
    def local(self) -> Name:
        """The address and port on this side."""
        return self._name(_LOCAL)

    @property
    def remote(self) -> Name:
        """The address and port of the other side."""
        return self._name(_REMOTE)

    @property
    def state(self) -> str:
        """The state, as two hexadecimal digits."""
        return self.words[_STATE]

    @property
    def owner(self) -> int:
        """The id of the user who made the socket; meaningless for NO_INODE."""
        return int(self.words[_OWNER])

    @property
    def inode(self) -> int:
        """The number that names the socket among a process's files."""
        return int(self.words[_INODE])

    def _name(self, column: int) -> Name:
        number, _, port = self.words[column].partition(":")
        words = struct.unpack(f">{self.size // 4}I", bytes.fromhex(number))
        packed = struct.pack(f"={self.size // 4}I", *words)
        return plain(str(_TO_TEXT[self.size](packed))), int(port, 16)


def rows() -> Iterator[SocketRow]:
    """Yields all TCP sockets; none on systems without such tables."""
    for table, size in _TABLES:
        try:
            lines = pathlib.Path(table).read_text().splitlines()[1:]
        except OSError:  # not Linux, or no IPv6
            continue
        for line in lines:
            yield SocketRow(tuple(line.split()), size)


def plain(address: str) -> str:
    """Returns an address without a scope, and an IPv4-mapped one as IPv4.

    Raises:
        ValueError: It is not a number.

    Example:
        >>> from replicator.launch import sockets
        >>> sockets.plain("::ffff:10.0.0.1"), sockets.plain("fe80::1%eth0")
        ('10.0.0.1', 'fe80::1')
    """
    number = ipaddress.ip_address(address.partition("%")[0])
    return str(getattr(number, "ipv4_mapped", None) or number)


def owner(local: Name, remote: Name) -> int | None:
    """Returns the id of the user who made a connection of this machine.

    Args:
        local: The connecting side's address and port.
        remote: The address and port to which it connects.

    Returns:
        The user's id; None if no process holds such a connection: the kernel gives
        sockets that were closed to root.
    """
    # A socket may be closed while the kernel writes its row: only if the second look
    # finds it, was it open during the first.
    first, second = _owned(local, remote), _owned(local, remote)
    return first[0] if first is not None and first == second else None


def _owned(local: Name, remote: Name) -> tuple[int, int] | None:
    ports = f":{local[1]:04X}", f":{remote[1]:04X}"
    for row in rows():
        ends = row.words[_LOCAL], row.words[_REMOTE]
        if not (ends[0].endswith(ports[0]) and ends[1].endswith(ports[1])):
            continue  # before the addresses are parsed: there may be many rows
        if (row.local, row.remote) == (local, remote) and row.inode != NO_INODE:
            return row.owner, row.inode
    return None
