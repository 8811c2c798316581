# SPDX-License-Identifier: Apache-2.0
"""Other hosts, by asyncssh: connections, and commands under keepers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from typing import Any

from replicator.launch import output, processes, versions
from replicator.launch.commands import Command
from replicator.launch.flags import Job
from replicator.launch.hosts import Host, LaunchError
from replicator.launch.processes import LOST, Process

_FAILED = 255  # the status of ssh where it cannot do what it should
_NOT_FOUND = (126, 127)  # a shell's status for a command that does not exist
_BEATS = 3  # heartbeats are sent, and expected, so often in their time
# The part of a heartbeat after which a silent host is lost: it is to be named within.
_SILENT = 0.7
_MOST_SAID = 300


class Remote:
    """A host to which there is a connection.

    Args:
        host: The host.
        connection: Of asyncssh.
        python: The interpreter there.
        heartbeat: Seconds after which a silent connection is lost.

    Attributes:
        address: The host's own, as seen from here; "" behind a jump host.
        own_address: This host's, as seen from there; "" behind a jump host.
        package: Where replicator is there, once `check` was called.
    """

    def __init__(
        self, host: Host, connection: Any, python: str, heartbeat: float
    ) -> None:
        self.host, self.connection, self.python = host, connection, python
        self.package = ""
        self._heartbeat = heartbeat
        peer = connection.get_extra_info("peername")
        own = connection.get_extra_info("sockname")
        self.address: str = peer[0] if peer else ""
        self.own_address: str = own[0] if own else ""

    async def start(self, command: Command) -> Process:
        """Starts a command under a keeper there."""
        words = [self.python, "-I", "-c", processes.BOOT, self.host.name]
        try:
            child = await self.connection.create_process(
                f"exec {shlex.join(words)}", encoding=None
            )
        except _errors() as error:
            raise LaunchError(f"{self.host.name}: {_told(error)}", _FAILED) from error
        child.stdin.write(processes.start(command, processes.silence(self._heartbeat)))
        beating = asyncio.create_task(self._beat(child))

        async def wait() -> int:
            await child.wait_closed()
            beating.cancel()
            return _status(child)

        outputs = (child.stdout, child.stderr)
        return Process(self.host.name, child.stdin.write, outputs, wait(), child.close)

    async def _beat(self, child: Any) -> None:
        while True:
            await asyncio.sleep(self._heartbeat / _BEATS)
            with contextlib.suppress(OSError):
                child.stdin.write(b"beat\n")

    async def run(self, command: Command) -> tuple[int, bytes, bytes]:
        """Runs a command under a keeper; returns its status, output and error."""
        process = await self.start(command)
        said: tuple[list[bytes], list[bytes]] = ([], [])
        pumps = [
            output.pump(reader, pieces.append)
            for reader, pieces in zip(process.outputs, said, strict=True)
            if reader
        ]
        try:
            await asyncio.gather(*pumps)
            status = await process.status
        finally:
            process.send(f"end {int(signal.SIGTERM)}")
        return status, b"".join(said[0]), b"".join(said[1])

    async def send(self, script: str, argument: str, data: bytes) -> None:
        """Runs a Python script there, with bytes as its standard input.

        Raises:
            LaunchError: It fails.
        """
        words = [self.python, "-I", "-c", script, argument]
        try:
            done = await self.connection.run(
                f"exec {shlex.join(words)}", input=data, encoding=None
            )
        except _errors() as error:
            raise LaunchError(f"{self.host.name}: {_told(error)}", _FAILED) from error
        if done.exit_status != 0:
            said = last_line(done.stderr)
            raise LaunchError(f"{self.host.name}: --sync failed: {said}", 1)

    async def check(self, job: Job, cwd: str) -> None:
        """Sees to it that servers can run there.

        Raises:
            LaunchError: Python or a package is missing, or has another version.
        """
        source = processes.source_of(versions)
        argv = (self.python, "-c", source)
        status, stdout, stderr = await self.run(Command(argv, dict(job.env), cwd))
        if status in _NOT_FOUND:
            text = (
                f"{self.host.name}: there is no {self.python}; --python names another"
            )
            raise LaunchError(text)
        try:
            theirs = json.loads(stdout.splitlines()[-1])
        except (ValueError, IndexError) as error:
            said = last_line(stderr) or f"status {status}"
            text = f"{self.host.name}: {self.python} does not run: {said}"
            raise LaunchError(text, _FAILED) from error
        self.package = theirs["path"] or ""
        compare(self.host.name, self.python, versions.versions(), theirs)


def compare(
    name: str,
    python: str,
    own: dict[str, str | None],
    theirs: dict[str, str | None],
) -> None:
    """Compares the versions of two hosts.

    Raises:
        LaunchError: A package is missing there, or has another version.
    """
    for package in ("replicator", "tensorflow"):
        if theirs[package] is None:
            raise LaunchError(f"{name}: {python} has no package {package}")
        if theirs[package] != own[package]:
            raise LaunchError(
                f"{name}: {package} is {theirs[package]} there and {own[package]} "
                "here; all hosts need the same"
            )


async def connect(host: Host, job: Job, python: str) -> Remote:
    """Connects to a host.

    Raises:
        LaunchError: That fails: the host cannot be reached, is not the one that is
            known, or lets nobody in.
    """
    asyncssh = _asyncssh()
    options: dict[str, Any] = {}
    if job.ssh_port is not None:
        options["port"] = job.ssh_port
    if host.user is not None:
        options["username"] = host.user
    if job.identity is not None:
        options["client_keys"] = [os.path.expanduser(job.identity)]
    try:
        connection = await asyncssh.connect(
            host.name,
            # A silent host is lost after one interval and so many without an answer.
            keepalive_interval=_SILENT * job.heartbeat / (_BEATS + 1),
            keepalive_count_max=_BEATS,
            connect_timeout=job.start_timeout,
            login_timeout=job.start_timeout,
            **options,
        )
    except asyncssh.HostKeyNotVerifiable as error:
        raise LaunchError(
            f"{host.name}: its host key is unknown or not the one in "
            "~/.ssh/known_hosts; log in once by ssh to see and keep it",
            _FAILED,
        ) from error
    except asyncssh.PermissionDenied as error:
        text = f"{host.name}: authentication failed; --identity names a key"
        raise LaunchError(text, _FAILED) from error
    except (asyncssh.KeyImportError, asyncssh.ConfigParseError) as error:
        raise LaunchError(f"{host.name}: {_told(error)}") from error
    except _errors() as error:
        text = f"{host.name}: unreachable: {_told(error)}"
        raise LaunchError(text, _FAILED) from error
    return Remote(host, connection, python, job.heartbeat)


def last_line(said: bytes) -> str:
    """Returns the last line of what a process has said, cut off where it is long."""
    lines = said.decode(errors="replace").strip().splitlines()
    return lines[-1][:_MOST_SAID] if lines else ""


def _asyncssh() -> Any:
    try:
        import asyncssh
    except ImportError as error:
        raise LaunchError(
            "other hosts need asyncssh: pip install 'replicator[hosts]'"
        ) from error
    return asyncssh


def _errors() -> tuple[type[BaseException], ...]:
    return (_asyncssh().Error, OSError, TimeoutError)


def _told(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    if isinstance(error, OSError) and isinstance(number, int) and number > 0:
        return os.strerror(number)
    return " ".join(str(error).split())[:_MOST_SAID] or type(error).__name__


def _status(child: Any) -> int:
    """Returns the status of a process of asyncssh that has ended."""
    if child.exit_signal:
        name = f"SIG{child.exit_signal[0]}"
        return 128 + getattr(signal, name, signal.SIGKILL)
    return LOST if child.exit_status is None else child.exit_status
