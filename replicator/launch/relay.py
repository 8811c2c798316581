# SPDX-License-Identifier: Apache-2.0
"""Runs a server that can be reached only through sockets in a folder.

The server gets a network of its own (a Linux network namespace), with nothing but a
loopback interface. Sockets in the file system work across namespaces, so a process
beside the server passes bytes between them and ports: from one socket to the server's
port, and from the ports that stand for the other hosts to the other sockets. The file
is run by its path, with only the standard library.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG = 1
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_CHUNK = 1 << 18
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def main(argv: list[str]) -> None:
    """Becomes the command in argv[2:], in a network that argv[1] describes.

    argv[1] is a JSON object: `accept`, the path of a socket and the server's port to
    which it leads; `listen`, pairs of a port and the path to which it leads.
    """
    spec = json.loads(argv[1])
    try:
        enter_network()
    except OSError as error:
        _fail(
            "--tunnel: this system does not let a process have its own network "
            f"({error.strerror})"
        )
    path, port = spec["accept"]
    _lock(os.path.dirname(path))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    accepting = [(listener, _to_port(port))]
    for port, path in spec["listen"]:
        listening = socket.socket()
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        accepting.append((listening, _to_path(path)))
    for listening, _ in accepting:
        listening.listen(128)
    server = os.getpid()
    if os.fork() == 0:
        _relay(accepting, server)
    os.execvp(argv[2], argv[2:])  # closes the sockets in this process


def enter_network() -> None:
    """Moves this process to a network of its own with only a loopback interface.

    Raises:
        OSError: The system does not allow it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_CLONE_NEWNET) != 0:  # needs rights that users lack
        if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{user} {user} 1")
        _write("/proc/self/gid_map", f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh22x", b"lo", 0)
        reply = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
        (flags,) = struct.unpack_from("h", reply, 16)
        request = struct.pack("16sh22x", b"lo", flags | _IFF_UP)
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, request)


async def join(left: _Streams, right: _Streams) -> None:
    """Passes bytes both ways between two connections until both have ended."""
    await asyncio.gather(_pass(left[0], right[1]), _pass(right[0], left[1]))
    for _, writer in (left, right):
        writer.close()


def forwarder(
    connect: Callable[[], Awaitable[_Streams]],
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Returns a server's handler that joins each connection to one from `connect`.

    The handler keeps references to its tasks: once one side has sent all its data,
    asyncio holds neither the tasks nor the connections, which could be collected.
    """
    running: set[asyncio.Task[Any] | None] = set()

    async def forward(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        running.add(asyncio.current_task())
        try:
            await join((reader, writer), await connect())
        except OSError:
            writer.close()
        finally:
            running.discard(asyncio.current_task())

    return forward


def _to_port(port: int) -> Any:
    return forwarder(lambda: asyncio.open_connection("127.0.0.1", port))


def _to_path(path: str) -> Any:
    return forwarder(lambda: asyncio.open_unix_connection(path))


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_CHUNK):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()


def _lock(folder: str) -> None:
    """Locks a folder while this process or a fork of it lives; see folders.py."""
    path = os.path.join(folder, ".replicator-lock")
    lock = os.open(f"{path}.new", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(f"{path}.new", path)


def _relay(accepting: list[tuple[socket.socket, Any]], server: int) -> None:
    """Passes bytes on for as long as the server lives."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):  # these are the server's, and must close with it
        os.dup2(devnull, descriptor)
    if os.getppid() == server:
        asyncio.run(_accept(accepting))
    os._exit(0)


async def _accept(accepting: list[tuple[socket.socket, Any]]) -> None:
    for listening, forward in accepting:
        if listening.family == socket.AF_UNIX:
            await asyncio.start_unix_server(forward, sock=listening, limit=_CHUNK)
        else:
            await asyncio.start_server(forward, sock=listening, limit=_CHUNK)
    await asyncio.Event().wait()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _fail(text: str) -> None:
    sys.exit(f"replicator.launch: {text}")


if __name__ == "__main__":
    main(sys.argv)
