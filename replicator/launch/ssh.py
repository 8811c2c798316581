# SPDX-License-Identifier: Apache-2.0
"""Connects to other hosts by asyncssh, and runs commands there under keepers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Mapping
from typing import Any

from replicator.launch import output, processes, questions
from replicator.launch.commands import Command
from replicator.launch.flags import IN_GRAPH, Job
from replicator.launch.hosts import JobHost, LaunchError
from replicator.launch.processes import LOST, Process

_FAILED = 255  # the status of ssh for its own failures
_NOT_FOUND = (126, 127)  # a shell's statuses for a command that cannot be run
_BEATS = 3  # signs of life that are sent, and expected, per heartbeat
# The fraction of a heartbeat after which a silent host counts as lost, so that it is
# named within the heartbeat.
_SILENT = 0.7
_MOST_TEXT = 300


class Remote:
    """A host with an open connection.

    Args:
        host: The host.
        connection: The connection of asyncssh.
        python: The Python interpreter of the host.
        heartbeat: Seconds after which a silent connection counts as lost.

    Attributes:
        address: The host's address, as seen from here; "" behind a jump host.
        own_address: This host's address, as seen from there; "" behind a jump host.
        package: The path of replicator on the host, set by `check`.
    """

    def __init__(
        self, host: JobHost, connection: Any, python: str, heartbeat: float
    ) -> None:
        self.host, self.connection, self.python = host, connection, python
        self.package = ""
        self._heartbeat = heartbeat
        peer = connection.get_extra_info("peername")
        local = connection.get_extra_info("sockname")
        self.address: str = peer[0] if peer else ""
        self.own_address: str = local[0] if local else ""

    async def start(self, command: Command) -> Process:
        """Starts a command under a keeper on the host."""
        words = [self.python, "-I", "-c", processes.BOOT, self.host.name]
        try:
            child = await self.connection.create_process(
                f"exec {shlex.join(words)}", encoding=None
            )
        except _errors() as error:
            raise LaunchError(f"{self.host.name}: {_reason(error)}", _FAILED) from error
        child.stdin.write(processes.start(command, processes.silence(self._heartbeat)))
        beat_task = asyncio.create_task(self._beat(child))

        async def wait() -> int:
            await child.wait_closed()
            beat_task.cancel()
            return _status(child)

        outputs = (child.stdout, child.stderr)
        return Process(self.host.name, child.stdin.write, outputs, wait(), child.close)

    async def _beat(self, child: Any) -> None:
        while True:
            await asyncio.sleep(self._heartbeat / _BEATS)
            with contextlib.suppress(OSError):
                child.stdin.write(b"beat\n")

    async def run(self, command: Command) -> tuple[int, bytes, bytes]:
        """Runs a command under a keeper; returns its status, output and errors."""
        process = await self.start(command)
        captured: tuple[list[bytes], list[bytes]] = ([], [])
        pumps = [
            output.pump(reader, chunks.append)
            for reader, chunks in zip(process.outputs, captured, strict=True)
            if reader
        ]
        try:
            await asyncio.gather(*pumps)
            status = await process.status
        finally:
            process.send(f"end {int(signal.SIGTERM)}")
        return status, b"".join(captured[0]), b"".join(captured[1])

    async def ask(self, *question: str) -> Any:
        """Returns the host's answer to one of questions.py, or None."""
        argv = (self.python, "-I", "-c", processes.source_of(questions), *question)
        _, stdout, _ = await self.run(Command(argv, {}, "/"))
        try:
            return json.loads(stdout.splitlines()[-1])
        except (ValueError, IndexError):
            return None

    async def send(self, script: str, argument: str, data: bytes) -> None:
        """Runs a Python script on the host, with bytes as its standard input.

        Raises:
            LaunchError: The script fails.
        """
        words = [self.python, "-I", "-c", script, argument]
        try:
            result = await self.connection.run(
                f"exec {shlex.join(words)}", input=data, encoding=None
            )
        except _errors() as error:
            raise LaunchError(f"{self.host.name}: {_reason(error)}", _FAILED) from error
        if result.exit_status != 0:
            text = last_line(result.stderr)
            raise LaunchError(f"{self.host.name}: --sync failed: {text}", 1)

    async def check(self, job: Job, cwd: str) -> None:
        """Checks that servers can run on the host.

        Raises:
            LaunchError: Python or a package is missing, or has another version.
        """
        script = "" if job.program[0] == "-m" else job.program[0]
        source = processes.source_of(questions)
        argv = (self.python, "-c", source, "versions", cwd, script)
        status, stdout, stderr = await self.run(Command(argv, dict(job.env), cwd))
        if status in _NOT_FOUND:
            text = (
                f"{self.host.name}: there is no {self.python}; --python names another"
            )
            raise LaunchError(text)
        try:
            facts = dict(json.loads(stdout.splitlines()[-1]))
        except (ValueError, IndexError, TypeError) as error:
            reason = last_line(stderr) or f"status {status}"
            problem = (
                f"does not run: {reason}" if status else "is no Python interpreter"
            )
            text = f"{self.host.name}: {self.python} {problem}"
            raise LaunchError(text, _FAILED) from error
        self.package = facts["path"] or ""
        compare(self.host.name, self.python, questions.versions(), facts)
        if job.mode != IN_GRAPH:
            refuse_missing(self.host.name, job.program[0], cwd, facts)


def compare(
    name: str,
    python: str,
    versions: Mapping[str, str | None],
    remote_versions: Mapping[str, str | None],
) -> None:
    """Checks that another host has the package versions of this one.

    Raises:
        LaunchError: A package is missing there, or has another version.
    """
    for package in ("replicator", "tensorflow"):
        if remote_versions[package] is None:
            raise LaunchError(f"{name}: {python} has no package {package}")
        if remote_versions[package] != versions[package]:
            raise LaunchError(
                f"{name}: {package} is {remote_versions[package]} there and "
                f"{versions[package]} here; all hosts need the same"
            )


def refuse_missing(name: str, program: str, cwd: str, facts: Mapping[str, Any]) -> None:
    """Refuses a host that lacks the program of modes in which every host runs it.

    Without the launcher's working directory, it would run what has this name elsewhere.

    Args:
        name: The host.
        program: The script, or "-m".
        cwd: The launcher's working directory.
        facts: As questions.program returns them.

    Raises:
        LaunchError: The working directory or the script is missing.
    """
    missing = "" if facts["script"] else f"no {program} in {cwd}"
    if not facts["folder"] and not os.path.isabs(program):
        missing = f"no {cwd}, where the program runs"
    if missing:
        text = f"{name}: there is {missing}; --sync copies the working directory"
        raise LaunchError(text)


async def connect(host: JobHost, job: Job, python: str) -> Remote:
    """Connects to a host.

    Raises:
        LaunchError: The host cannot be reached, its host key is not the known one, or
            it denies access.
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
            # A silent host is lost after one interval, and `keepalive_count_max` more.
            keepalive_interval=_SILENT * job.heartbeat / (_BEATS + 1),
            keepalive_count_max=_BEATS,
            connect_timeout=job.start_timeout,
            login_timeout=job.start_timeout,
            **options,
        )
    except asyncssh.HostKeyNotVerifiable as error:
        raise LaunchError(
            f"{host.name}: its host key is unknown or not the one in "
            "~/.ssh/known_hosts; log in once with ssh to check and save it",
            _FAILED,
        ) from error
    except asyncssh.PermissionDenied as error:
        text = f"{host.name}: authentication failed; --identity names a key"
        raise LaunchError(text, _FAILED) from error
    except (asyncssh.KeyImportError, asyncssh.ConfigParseError) as error:
        raise LaunchError(f"{host.name}: {_reason(error)}") from error
    except _errors() as error:
        text = f"{host.name}: unreachable: {_reason(error)}"
        raise LaunchError(text, _FAILED) from error
    return Remote(host, connection, python, job.heartbeat)


def last_line(output: bytes) -> str:
    """Returns the last line of a process's output, truncated if it is long."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:_MOST_TEXT] if lines else ""


def _asyncssh() -> Any:
    try:
        import asyncssh
    except ImportError as error:
        raise LaunchError(
            "other hosts need asyncssh: pip install 'replicator[hosts]'"
        ) from error
    return asyncssh


def _errors() -> tuple[type[BaseException], ...]:
    # Python raises UnicodeError for names whose parts are empty or longer than 63.
    return (_asyncssh().Error, OSError, TimeoutError, UnicodeError)


def _reason(error: BaseException) -> str:
    number = getattr(error, "errno", None)
    if isinstance(error, OSError) and isinstance(number, int) and number > 0:
        return os.strerror(number)
    if isinstance(error, UnicodeError):
        return "hosts have no such names, of which a part is empty or too long"
    return " ".join(str(error).split())[:_MOST_TEXT] or type(error).__name__


def _status(child: Any) -> int:
    """Returns the status, as in a shell, of an asyncssh process that has ended."""
    if child.exit_signal:
        name = f"SIG{child.exit_signal[0]}"
        return 128 + getattr(signal, name, signal.SIGKILL)
    return LOST if child.exit_status is None else child.exit_status
