# SPDX-License-Identifier: Apache-2.0
"""Runs an SSH server as a process of the user's, for tests."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from tests.launch.stub import MARK

ADDRESS = "127.0.0.2"  # this host, at an address that the launcher does not know
PATH = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
_PORT = 22  # omitted in known_hosts
_CONFIG = """
ListenAddress {address}:{port}
HostKey {root}/host_key
AuthorizedKeysFile {root}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
PermitRootLogin yes
SetEnv {variables}
"""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        root: The folder of its files; the launcher's HOME.
        port: Its port.
        pid: Its process id.
        address: Its address.
    """

    root: pathlib.Path
    port: int
    pid: int
    address: str = ADDRESS

    @property
    def flags(self) -> tuple[str, ...]:
        """The launcher's flags for the server and its stub of replicator."""
        return (
            f"--hosts={getpass.getuser()}@{self.address}:2",
            f"--ssh-port={self.port}",
            f"--identity={self.root}/key",
            "--env=PYTHONPATH",
        )

    def connections(self) -> list[int]:
        """Returns the sshd processes that serve connections."""
        children = pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in children.read_text().split()]


def configure(
    root: pathlib.Path,
    port: int,
    mark: str,
    address: str = ADDRESS,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Makes keys and a configuration; returns its path.

    Args:
        root: The folder of the files.
        port: The server's port.
        mark: The mark of all processes of the test.
        address: The server's address.
        variables: Additional environment variables of sessions.
    """
    import asyncssh

    host_key, key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    _write(root / "host_key", host_key.export_private_key())
    _write(root / "key", key.export_private_key())
    _write(root / "authorized_keys", key.export_public_key())
    (root / ".ssh").mkdir()
    host_line = host_key.export_public_key().decode()
    name = address if port == _PORT else f"[{address}]:{port}"
    _write(root / ".ssh" / "known_hosts", f"{name} {host_line}".encode())
    if os.getuid() == 0:  # the chroot of sshd's unprivileged part
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    named = {MARK: mark, **(variables or {})}
    config = _CONFIG.format(
        address=address,
        port=port,
        root=root,
        variables=" ".join(f'"{name}={value}"' for name, value in named.items()),
    )
    _write(root / "sshd_config", config.encode())
    return str(root / "sshd_config")


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[int]:
    """Runs a server in this block; yields its process once it listens.

    Args:
        command: The command that runs it, with -D and -e, perhaps on another network.
    """
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr
            lines = [server.stderr.readline()]
            while "listening" not in lines[-1]:
                assert lines[-1], f"sshd does not start: {lines}"
                lines.append(server.stderr.readline())
            yield server.pid
        finally:
            server.kill()


def _write(path: pathlib.Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)
