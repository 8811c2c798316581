# SPDX-License-Identifier: Apache-2.0
"""`--tunnel`: routes all traffic between hosts through SSH, by way of this host.

Each server, and the program, has a port that is reserved for it on every host. The
launcher listens on the ports of the servers on this host, and SSH forwards each
connection to a socket in a folder of the server's host, where the relay (relay.py)
passes it to the server. Connections from a server to another's port take the same route
in reverse. A port of this host is open to all of its users, so the launcher asks the
kernel who owns each connection, and passes on the bytes of this user only.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from replicator.launch import folders, processes, relay, sockets, ssh
from replicator.launch.commands import Command
from replicator.launch.hosts import LaunchError
from replicator.launch.ssh import Remote

_LOOPBACK = "127.0.0.1"
_FAILED = 255
_TIDYING = 2.0  # seconds for the removal of a folder on a host that may be lost


@dataclasses.dataclass(frozen=True)
class Door:
    """The way to one server.

    Attributes:
        port: The server's port, on every host.
        folder: The folder of its sockets, on its host.
    """

    port: int
    folder: str

    @property
    def socket_path(self) -> str:
        """The path of the socket that leads to the server."""
        return f"{self.folder}/in"

    def towards(self, port: int) -> str:
        """Returns the path of the socket that leads from the server to a port."""
        return f"{self.folder}/{port}"


class Tunnel:
    """All forwards of a job; `open_tunnel` makes one.

    Attributes:
        client: The address of the program.
        doors: The ways to the servers, in host order.
    """

    def __init__(
        self, client: int, doors: list[Door], unused: dict[str, Remote]
    ) -> None:
        self.client = f"{_LOOPBACK}:{client}"
        self._client, self._unused = client, unused
        self.doors = doors

    def listen(self, index: int) -> str:
        """Returns the address at which a server must listen."""
        return f"{_LOOPBACK}:{self.doors[index].port}"

    def wrap(self, index: int, command: Command, package: str) -> Command:
        """Wraps the command of a server in the relay.

        Args:
            index: The number of its host.
            command: Runs the server; its first word is a Python interpreter.
            package: The path of replicator on that host.
        """
        own_door = self.doors[index]
        others = [door.port for door in self.doors if door != own_door]
        ports = [*others, self._client]
        spec = {
            "accept": [own_door.socket_path, own_door.port],
            "listen": [[port, own_door.towards(port)] for port in ports],
        }
        self._unused.pop(own_door.folder, None)  # its keeper removes it
        path = str(pathlib.PurePosixPath(package) / "launch" / "relay.py")
        words = (command.argv[0], "-I", path, json.dumps(spec))
        return dataclasses.replace(
            command, argv=(*words, *command.argv), remove=own_door.folder
        )


async def open_tunnel(
    remotes: list[Remote | None],
    stack: contextlib.AsyncExitStack,
    run_all: Callable[[list[Coroutine[Any, Any, Door]]], Awaitable[list[Door]]],
) -> Tunnel:
    """Opens the forwards of all hosts.

    Args:
        remotes: The connection to each host; None for this one.
        stack: Closes the forwards.
        run_all: Waits for a coroutine of each host.

    Raises:
        LaunchError: A host does not allow forwards.
    """
    unused: dict[str, Remote] = {}
    stack.push_async_callback(_remove, unused)
    doors = await run_all([_open_door(remote, stack, unused) for remote in remotes])
    tunnel = Tunnel(_free_port(), doors, unused)
    for remote, own_door in zip(remotes, doors, strict=True):
        others = [door.port for door in doors if door != own_door]
        for port in [*others, int(tunnel.client.rpartition(":")[2])]:
            await _open_way_back(remote, own_door.towards(port), port, stack)
    return tunnel


async def _open_door(
    remote: Remote | None, stack: contextlib.AsyncExitStack, unused: dict[str, Remote]
) -> Door:
    """Opens a port on this host that leads to a server."""
    if remote is None:
        folder = tempfile.mkdtemp(prefix="replicator-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        socket_path = Door(0, folder).socket_path
        forward = relay.forwarder(lambda: asyncio.open_unix_connection(socket_path))

        async def forward_own(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            port = writer.get_extra_info("sockname")[1]
            if _is_own(writer.get_extra_info("peername")[:2], port):
                await forward(reader, writer)
            else:
                writer.close()

        server = await asyncio.start_server(forward_own, _LOOPBACK, 0)
        stack.callback(server.close)
        return Door(server.sockets[0].getsockname()[1], folder)
    folder = await _folder(remote)
    unused[folder] = remote
    listening: list[int] = []

    def admits(host: str, port: int) -> bool:
        return any(_is_own((host, port), own_port) for own_port in listening)

    with _refused(remote):
        listener = await remote.connection.forward_local_port_to_path(
            _LOOPBACK, 0, Door(0, folder).socket_path, admits
        )
    listening.append(listener.get_port())
    stack.callback(listener.close)
    return Door(listener.get_port(), folder)


def _is_own(peer: sockets.Name, port: int) -> bool:
    """Whether a connection to a port of the launcher was made by its own user."""
    return sockets.owner(peer, (_LOOPBACK, port)) == os.geteuid()


async def _open_way_back(
    remote: Remote | None, path: str, port: int, stack: contextlib.AsyncExitStack
) -> None:
    """Makes a host forward a socket to a port of this host."""
    if remote is None:
        forward = relay.forwarder(lambda: asyncio.open_connection(_LOOPBACK, port))
        server: Any = await asyncio.start_unix_server(forward, path)
    else:
        with _refused(remote):
            server = await remote.connection.forward_remote_path_to_port(
                path, _LOOPBACK, port
            )
    stack.callback(server.close)


async def _folder(remote: Remote) -> str:
    """Creates a folder on a host; the keeper of its server removes it."""
    source = processes.source_of(folders)
    command = Command((remote.python, "-I", "-c", source), {}, "/")
    status, stdout, _ = await remote.run(command)
    folder = ssh.last_line(stdout)  # the shell's own files may print before
    if status != 0 or not folder:
        text = f"{remote.host.name}: --tunnel: cannot create a folder there"
        raise LaunchError(text, _FAILED)
    return folder


async def _remove(unused: dict[str, Remote]) -> None:
    """Removes the folders whose servers were not started."""
    script = "import shutil,sys;shutil.rmtree(sys.argv[1],ignore_errors=True)"
    for folder, remote in unused.items():
        with contextlib.suppress(LaunchError, TimeoutError):
            async with asyncio.timeout(_TIDYING):
                words = (remote.python, "-I", "-c", script, folder)
                await remote.run(Command(words, {}, "/"))


@contextlib.contextmanager
def _refused(remote: Remote) -> Any:
    try:
        yield
    except Exception as error:  # asyncssh raises several kinds
        text = (
            f"{remote.host.name}: --tunnel: SSH does not forward sockets there: {error}"
        )
        raise LaunchError(text, _FAILED) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return int(probe.getsockname()[1])
