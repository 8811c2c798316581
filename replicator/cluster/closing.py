# SPDX-License-Identifier: Apache-2.0
"""Closes the port of this process's TensorFlow server to all who need no access.

TensorFlow's servers listen on all interfaces and ask for no password. The kernel can
restrict a socket that is listening already, even one of TensorFlow's: to connections
through one interface, which needs no privileges since Linux 5.7, and to connections
from some addresses, which needs CAP_NET_ADMIN on newer kernels. Both hold before a
connection is made. The loopback interface does not lead here from other machines;
connections from this machine to an address of eth0 count as connections through eth0.

Neither tells the users of one machine apart.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import fcntl
import gc
import ipaddress
import os
import pathlib
import platform
import signal
import socket
import struct
import time
from collections.abc import Iterator, Sequence

from absl import logging

from replicator.cluster import addresses
from replicator.launch import sockets

ONLY_HERE, EVERYBODY = "this machine", "whoever reaches this machine"
_IP = (socket.AF_INET, socket.AF_INET6)
LOOPBACK, _NETWORKS = "lo", ("127.0.0.0/8", "::1/128")
_SIOCGIFCONF, _INTERFACES = 0x8912, 256  # the most interfaces that are searched
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER
# Classic BPF: operations, and the offset that stands for the beginning of the header of
# IP, which is there for packets of both versions though a socket serves both.
_LOAD_BYTE, _LOAD_WORD, _AND, _RETURN = 0x30, 0x20, 0x54, 0x06
_JUMP, _JUMP_IF_EQUAL = 0x05, 0x15
_HEADER = -0x100000
_SOURCES = {4: 12, 6: 8}  # the offsets of a packet's source, by the version of IP
_PASS, _DROP = 0xFFFFFFFF, 0
_CLONE = {"x86_64": 56, "aarch64": 220}  # the numbers of the system call
_CLONE_FILES, _PR_SET_PDEATHSIG = 0x400, 1
_WAIT_ALL = 0x40000000  # __WALL: also waits for a child whose end sends no SIGCHLD
_LOOKS, _PAUSE = 100, 0.005  # seconds between two looks for strangers
_SURE = 3  # looks at the tables: one may miss rows while others come and go


@dataclasses.dataclass(frozen=True)
class Audience:
    """Who may connect.

    Attributes:
        interface: The network interface that connections must use; None: any.
        sources: The networks from which they may come; () means all.
        address: The address to which they come; "" if that is not known.
    """

    interface: str | None = None
    sources: tuple[str, ...] = ()
    address: str = ""

    @classmethod
    def of(cls, host: str, sources: Sequence[str] = ()) -> Audience:
        """Returns who needs to reach a server.

        Args:
            host: The name or number by which others reach the server, without a port.
            sources: The addresses from which they connect; () if these are not known.
        """
        if addresses.is_loopback(host):
            return cls(LOOPBACK, _NETWORKS)
        names_by_address = _interfaces(host)
        interfaces = set(names_by_address.values())
        # A name may mean 127.0.1.1 here and an address of eth0 elsewhere. A number that
        # is none of this machine's is translated on the way.
        if len(interfaces) != 1 or LOOPBACK in interfaces:
            return cls(None, tuple(sources))
        address = next(iter(names_by_address)) if len(names_by_address) == 1 else ""
        return cls(interfaces.pop(), tuple(sources), address)

    def admits(self, row: sockets.SocketRow) -> bool:
        """Whether a connection to the server may stay."""
        if self.address and row.local[0] != self.address:
            return False
        source = ipaddress.ip_address(row.remote[0])
        return not self.sources or any(
            source in ipaddress.ip_network(network) for network in self.sources
        )


def close(port: int, audience: Audience) -> str | None:
    """Closes the server that listens at a port of this process to all others.

    Connections that others have made before are shut down.

    Args:
        port: The port.
        audience: Who may connect.

    Returns:
        Who can connect now: "this machine", "10.0.0.1, 10.0.0.2", "whoever reaches
        eth0". None if this process does not listen there.
    """
    narrowed = []
    for descriptor in _descriptors().values():
        with contextlib.suppress(OSError), _borrowed(descriptor) as end:
            is_listening = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_listening and end.family in _IP and end.getsockname()[1] == port:
                narrowed.append(_narrow(end, audience))
    if not narrowed:
        return None
    _cut(port, audience)
    by_interface, by_source = map(all, zip(*narrowed, strict=True))
    if audience.interface == LOOPBACK and (by_interface or by_source):
        return ONLY_HERE
    if by_source and audience.sources:
        return ", ".join(audience.sources)
    return f"whoever reaches {audience.interface}" if by_interface else EVERYBODY


@contextlib.contextmanager
def own_server(address: str, sources: Sequence[str] = ()) -> Iterator[None]:
    """Closes the server that TensorFlow starts in this block at an address.

    TensorFlow's call may last until all hosts have joined, and holds Python's lock all
    the while, so that no thread could run. A copy of this process that shares its files
    closes the server, milliseconds after it has begun to listen; where there can be no
    such copy, the server is closed at the end of the block.

    Args:
        address: The "host:port" by which others reach the server.
        sources: The addresses from which they connect; () if these are not known.
    """
    host, port = addresses.split(address)
    assert port
    audience = Audience.of(host, sources)
    copy = _copy(port, audience)
    try:
        yield
    finally:
        if copy:
            with contextlib.suppress(OSError):
                os.kill(copy, signal.SIGKILL)
                os.waitpid(copy, _WAIT_ALL)
        answers = close(port, audience) or EVERYBODY  # not Linux
    if answers != ONLY_HERE:
        logging.warning(
            "This program's port %d answers %s: they can run code as this user.",
            port,
            answers,
        )


def program(networks: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """Returns a program of the kernel's filter that passes packets from networks.

    Args:
        networks: IPv4 and IPv6 networks or addresses.

    Returns:
        Instructions: operation, distance if true, distance if false, operand.
    """
    parsed = [ipaddress.ip_network(network) for network in networks]
    code = [(_LOAD_BYTE, 0, 0, _HEADER), (_AND, 0, 0, 0xF0)]
    for version, source in _SOURCES.items():
        section = []
        for network in parsed:
            if network.version == version:
                section += _passes(network, _HEADER + source)
        section.append((_RETURN, 0, 0, _DROP))
        code.append((_JUMP_IF_EQUAL, 1, 0, version << 4))
        code.append((_JUMP, 0, 0, len(section)))  # distances of `if` have 8 bits
        code += section
    return [*code, (_RETURN, 0, 0, _DROP)]


def _passes(
    network: ipaddress.IPv4Network | ipaddress.IPv6Network, source: int
) -> list[tuple[int, int, int, int]]:
    """Returns instructions that pass a packet of a network, and else continue."""
    size = network.max_prefixlen // 32
    values = struct.unpack(f">{size}I", network.network_address.packed)
    masks = struct.unpack(f">{size}I", network.netmask.packed)
    code: list[tuple[int, int, int, int]] = []
    for k, (value, mask) in enumerate(zip(values, masks, strict=True)):
        code += [
            (_LOAD_WORD, 0, 0, source + 4 * k),
            (_AND, 0, 0, mask),
            (_JUMP_IF_EQUAL, 0, 3 * (size - k - 1) + 1, value),
        ]
    return [*code, (_RETURN, 0, 0, _PASS)]


def _narrow(end: socket.socket, audience: Audience) -> tuple[bool, bool]:
    """Narrows a listening socket; returns whether to its interface, and its sources."""
    by_interface = by_source = False
    with contextlib.suppress(OSError, AttributeError):  # an old kernel
        if audience.interface is not None:
            name = audience.interface.encode() + b"\0"
            end.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, name)
            by_interface = True
    closes = by_interface and audience.interface == LOOPBACK
    with contextlib.suppress(OSError, struct.error):  # a new one, or too many
        if audience.sources and not closes:
            code = b"".join(
                struct.pack("HBBI", op, yes, no, k & 0xFFFFFFFF)
                for op, yes, no, k in program(audience.sources)
            )
            buffer = ctypes.create_string_buffer(code)
            filter_program = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
            end.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, filter_program)
            by_source = True
    return by_interface, by_source


def _cut(port: int, audience: Audience) -> None:
    """Shuts down the connections that others made before the server was closed."""
    calm = 0
    for _ in range(_LOOKS):
        own_inodes = _descriptors()
        strangers = [
            row
            for row in sockets.rows()
            if row.local[1] == port
            and row.state in sockets.OPEN
            and (row.inode in own_inodes or row.inode == sockets.NO_INODE)
            and not audience.admits(row)
        ]
        calm = 0 if strangers else calm + 1
        if calm == _SURE:
            return
        for row in strangers:
            with contextlib.suppress(OSError, KeyError):  # not accepted yet
                with _borrowed(own_inodes[row.inode]) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        time.sleep(_PAUSE)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Opens a socket of this process; a duplicate would outlive a copy killed here."""
    end = socket.socket(fileno=descriptor)
    try:
        yield end
    finally:
        end.detach()


def _descriptors() -> dict[int, int]:
    """Returns this process's sockets: their descriptors, by inode."""
    descriptors = {}
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                kind, _, number = os.readlink(f"/proc/self/fd/{name}").partition(":[")
                if kind == "socket":
                    descriptors[int(number.rstrip("]"))] = int(name)
    return descriptors


def _interfaces(host: str) -> dict[str, str]:
    """Returns the interfaces that have a name's addresses, by address."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return {}
    host_addresses = {sockets.plain(str(info[4][0])) for info in infos}
    return {a: name for a, name in _own_addresses() if a in host_addresses}


def _own_addresses() -> Iterator[tuple[str, str]]:
    """Yields this machine's addresses, each with its interface."""
    size = 40  # of a `struct ifreq`: a name of 16 bytes, and a `struct sockaddr_in`
    buffer = ctypes.create_string_buffer(size * _INTERFACES)
    request = struct.pack("iP", len(buffer), ctypes.addressof(buffer))
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        (used,) = struct.unpack_from("i", fcntl.ioctl(probe, _SIOCGIFCONF, request))
        for k in range(0, used, size):
            label = buffer.raw[k : k + 16].partition(b"\0")[0].decode()
            yield socket.inet_ntoa(buffer.raw[k + 20 : k + 24]), label.partition(":")[0]
    with contextlib.suppress(OSError):
        for row in pathlib.Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = row.split()
            yield str(ipaddress.IPv6Address(bytes.fromhex(number))), name


def _copy(port: int, audience: Audience) -> int:
    """Starts a copy of this process that closes a server; returns its id, or 0.

    It shares the descriptors of this process (CLONE_FILES), so that it can change the
    sockets of a call that has not returned. It runs no hooks of forks: some close
    files. A copy that cannot go on, since another thread held a lock, is killed like
    one that has nothing to do.
    """
    number = _CLONE.get(platform.machine())
    if number is None or not pathlib.Path("/proc/self/net/tcp").exists():
        return 0
    parent = os.getpid()
    library = ctypes.PyDLL(None)  # keeps Python's lock, which the copy then has, too
    # No SIGCHLD at its end: the program may have a handler.
    arguments = map(ctypes.c_long, (number, _CLONE_FILES, 0, 0, 0, 0))
    copy = int(library.syscall(*arguments))
    if copy == 0:
        try:
            gc.disable()  # nothing of TensorFlow's must end here
            library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            while os.getppid() == parent and close(port, audience) is None:
                time.sleep(_PAUSE)
        finally:
            os._exit(0)
    return max(0, copy)
