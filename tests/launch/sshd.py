"""How tests run an SSH server as a process of the user's."""

from __future__ import annotations

import dataclasses
import getpass
import os
import pathlib
import shutil

from tests.launch.stub import MARK

ADDRESS = "127.0.0.2"  # this host, by an address that the launcher does not know
PATH = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
_CONFIG = """
ListenAddress {address}:{port}
HostKey {root}/host_key
AuthorizedKeysFile {root}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
PidFile none
PermitRootLogin yes
SetEnv {mark_name}={mark}
"""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        root: Where its files are; the launcher's HOME.
        port: Where it listens.
        pid: Its process.
    """

    root: pathlib.Path
    port: int
    pid: int

    @property
    def flags(self) -> tuple[str, ...]:
        """The launcher's, so that it finds the server and its stub of replicator."""
        return (
            f"--hosts={getpass.getuser()}@{ADDRESS}:2",
            f"--ssh-port={self.port}",
            f"--identity={self.root}/key",
            "--env=PYTHONPATH",
        )

    def connections(self) -> list[int]:
        """Returns the processes of sshd that serve connections."""
        children = pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in children.read_text().split()]


def configure(root: pathlib.Path, port: int, mark: str) -> str:
    """Makes keys and a configuration; returns its path."""
    import asyncssh

    host_key, key = (asyncssh.generate_private_key("ssh-ed25519") for _ in range(2))
    _write(root / "host_key", host_key.export_private_key())
    _write(root / "key", key.export_private_key())
    _write(root / "authorized_keys", key.export_public_key())
    (root / ".ssh").mkdir()
    known = host_key.export_public_key().decode()
    _write(root / ".ssh" / "known_hosts", f"[{ADDRESS}]:{port} {known}".encode())
    if os.getuid() == 0:  # where sshd puts the part of itself without rights
        pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    config = _CONFIG.format(
        address=ADDRESS, port=port, root=root, mark_name=MARK, mark=mark
    )
    _write(root / "sshd_config", config.encode())
    return str(root / "sshd_config")


def _write(path: pathlib.Path, data: bytes) -> None:
    path.write_bytes(data)
    path.chmod(0o600)
