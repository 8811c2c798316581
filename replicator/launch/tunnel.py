# SPDX-License-Identifier: Apache-2.0
"""`--tunnel`: all traffic between hosts goes through SSH, by way of this host.

Each server, and the program, has a port that is its own on every host. Here the
launcher listens on those of the servers, and has each connection forwarded to a socket
in a folder of that host; the relay there (relay.py) passes it on to the server. What a
server sends to another's port goes the same way back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import shutil
import socket
import tempfile
from typing import Any

from replicator.launch import relay
from replicator.launch.commands import Command
from replicator.launch.hosts import LaunchError
from replicator.launch.ssh import Remote

_HERE = "127.0.0.1"
_FAILED = 255


@dataclasses.dataclass(frozen=True)
class Door:
    """How one server is reached.

    Attributes:
        port: Its own, on every host.
        folder: Where its sockets are, on its host.
    """

    port: int
    folder: str

    @property
    def within(self) -> str:
        """The socket that leads to the server."""
        return f"{self.folder}/in"

    def towards(self, port: int) -> str:
        """Returns the socket that leads from the server to another's port."""
        return f"{self.folder}/{port}"


class Tunnel:
    """All forwards; use `open`.

    Attributes:
        client: The address of the program.
        doors: Of the servers, in the order of the hosts.
    """

    def __init__(self, client: int, doors: list[Door]) -> None:
        self.client = f"{_HERE}:{client}"
        self._client = client
        self.doors = doors

    def listen(self, index: int) -> str:
        """Returns where a server is to listen."""
        return f"{_HERE}:{self.doors[index].port}"

    def wrap(self, index: int, command: Command, package: str) -> Command:
        """Returns the command of a server, with the relay around it.

        Args:
            index: Of its host.
            command: What runs the server; its first word is a Python.
            package: Where replicator is on that host.
        """
        own = self.doors[index]
        others = [door.port for door in self.doors if door != own]
        ports = [*others, self._client]
        spec = {
            "accept": [own.within, own.port],
            "listen": [[port, own.towards(port)] for port in ports],
        }
        path = str(pathlib.PurePosixPath(package) / "launch" / "relay.py")
        words = (command.argv[0], "-I", path, json.dumps(spec))
        return dataclasses.replace(
            command, argv=(*words, *command.argv), remove=own.folder
        )


async def open_tunnel(
    remotes: list[Remote | None], stack: contextlib.AsyncExitStack
) -> Tunnel:
    """Opens the forwards of all hosts.

    Args:
        remotes: By host; None is this one.
        stack: Closes them.

    Raises:
        LaunchError: A host does not allow it.
    """
    doors = [await _open_door(remote, stack) for remote in remotes]
    tunnel = Tunnel(_free_port(), doors)
    for remote, own in zip(remotes, doors, strict=True):
        others = [door.port for door in doors if door != own]
        for port in [*others, int(tunnel.client.rpartition(":")[2])]:
            await _open_way_back(remote, own.towards(port), port, stack)
    return tunnel


async def _open_door(remote: Remote | None, stack: contextlib.AsyncExitStack) -> Door:
    """Listens here for a server."""
    if remote is None:
        folder = tempfile.mkdtemp(prefix="replicator-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        within = Door(0, folder).within
        forward = relay.forwarder(lambda: asyncio.open_unix_connection(within))
        server = await asyncio.start_server(forward, _HERE, 0)
        stack.callback(server.close)
        return Door(server.sockets[0].getsockname()[1], folder)
    folder = await _folder(remote)
    with _refused(remote):
        listener = await remote.connection.forward_local_port_to_path(
            _HERE, 0, Door(0, folder).within
        )
    stack.callback(listener.close)
    return Door(listener.get_port(), folder)


async def _open_way_back(
    remote: Remote | None, path: str, port: int, stack: contextlib.AsyncExitStack
) -> None:
    """Has a host forward a socket to a port here."""
    if remote is None:
        forward = relay.forwarder(lambda: asyncio.open_connection(_HERE, port))
        server: Any = await asyncio.start_unix_server(forward, path)
    else:
        with _refused(remote):
            server = await remote.connection.forward_remote_path_to_port(
                path, _HERE, port
            )
    stack.callback(server.close)


async def _folder(remote: Remote) -> str:
    """Makes a folder on a host, which the keeper of its server removes."""
    script = "import tempfile;print(tempfile.mkdtemp(prefix='replicator-'))"
    command = Command((remote.python, "-I", "-c", script), {}, "/")
    status, said, _ = await remote.run(command)
    folder = said.decode(errors="replace").strip()
    if status != 0 or not folder:
        text = f"{remote.host.name}: --tunnel: no folder can be made there"
        raise LaunchError(text, _FAILED)
    return folder


@contextlib.contextmanager
def _refused(remote: Remote) -> Any:
    try:
        yield
    except Exception as error:  # of asyncssh, which has several
        text = f"{remote.host.name}: --tunnel: SSH forwards no sockets there: {error}"
        raise LaunchError(text, _FAILED) from error


def _free_port() -> int:
    with socket.socket() as found:
        found.bind((_HERE, 0))
        return int(found.getsockname()[1])
