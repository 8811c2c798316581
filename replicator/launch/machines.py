# SPDX-License-Identifier: Apache-2.0
"""The hosts of a job: connects to them, and runs commands on them under keepers."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import pathlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any

from replicator.launch import (
    commands,
    keeper,
    local,
    output,
    questions,
    ssh,
    sync,
    tunnel,
)
from replicator.launch.commands import Command
from replicator.launch.flags import Job
from replicator.launch.hosts import JobHost, LaunchError
from replicator.launch.output import Lines, Output
from replicator.launch.processes import Process
from replicator.launch.ssh import Remote

_LOOPBACK = "127.0.0.1"
_LAST_LINES = 1.0  # seconds for the last output of processes that have ended
_PACKAGE = str(pathlib.Path(__file__).parent.parent)
# Called with each line before it is shown; returns True to hide the line.
Look = Callable[[bytes], bool]


def _pass(_: bytes) -> bool:
    return False


class Machines:
    """The hosts of a job, by number.

    Args:
        job: The job to launch.
        out: Receives the output of the hosts.
        stack: Closes connections and forwards, once all has ended.

    Attributes:
        remotes: The connections, set by `reach`; None stands for this host.
        addresses: The addresses by which the hosts reach each other, without ports.
        client: The "host:port" by which they reach this host; port 0 is any free one.
        sources: The addresses from which the hosts, and this one, connect to each
            other over a network; () if these are not known.
        tunnel: The tunnel, or None.
        last: The last line of each host's standard error, by name.
    """

    def __init__(self, job: Job, out: Output, stack: contextlib.AsyncExitStack) -> None:
        self._job, self._out, self._stack = job, out, stack
        self._pumps: dict[Process, list[asyncio.Task[None]]] = {}
        self.remotes: list[Remote | None] = []
        self.addresses: list[str] = []
        self.client = ""
        self.sources: tuple[str, ...] = ()
        self.tunnel: tunnel.Tunnel | None = None
        self.last: dict[str, bytes] = {}
        self._waiting: dict[asyncio.Future[Any], JobHost] = {}

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """Limits how long the hosts may take to become ready in this block.

        Raises:
            LaunchError: A host is not ready in time.
        """
        limit = self._job.start_timeout
        try:
            async with asyncio.timeout(limit):
                yield
        except TimeoutError as error:
            late = [h.name for task, h in self._waiting.items() if task.cancelled()]
            raise LaunchError(
                f"{', '.join(late) or 'this host'}: not up after {limit:g} seconds; "
                "--start-timeout allows more",
                1,
            ) from error

    async def run_all(
        self, coroutines: Sequence[Coroutine[Any, Any, Any]]
    ) -> list[Any]:
        """Returns the results of all hosts' coroutines; the first error cancels all.

        If they take too long, `in_time` names the hosts whose coroutines have not
        ended, and not those that wait for these.

        Args:
            coroutines: One coroutine for each of the first hosts.
        """
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        self._waiting = dict(zip(tasks, self._job.hosts, strict=False))
        return await gather(tasks)

    async def reach(self, retry: bool) -> None:
        """Connects to all hosts, copies files to them, and checks their packages.

        Args:
            retry: Whether to wait for hosts that cannot be reached yet.

        Raises:
            LaunchError: A host cannot be reached or used.
        """
        job = self._job
        remotes = await self.run_all([self._connect(host, retry) for host in job.hosts])
        others = [remote for remote in remotes if remote]
        if job.sync and others:
            names, description = await sync.choose(os.getcwd())
            archive = await asyncio.to_thread(sync.pack, os.getcwd(), names)
            text = f"{len(names)} {description}, {len(archive) / 1e6:.1f} MB packed"
            await self.run_all(
                [self._copy(remote, archive, text) for remote in remotes]
            )
        await self.run_all([self._check(remote) for remote in remotes])
        self.client = commands.any_port(
            others[0].own_address or _LOOPBACK if others else _LOOPBACK
        )
        refuse_exposed(job, others)
        if job.tunnel:
            self.tunnel = await tunnel.open_tunnel(remotes, self._stack, self.run_all)
            self.client = self.tunnel.client
        own_address = self.client.rpartition(":")[0].strip("[]")
        self.addresses = [
            remote.address if remote else own_address for remote in remotes
        ]
        self.remotes = remotes
        if others and not job.tunnel and not is_loopback(own_address):
            self.sources = await self._find_sources(own_address)

    async def _find_sources(self, own_address: str) -> tuple[str, ...]:
        """Returns the addresses from which the hosts and this one connect."""
        addresses = sorted({own_address, *self.addresses})
        sources_by_host = await gather(
            [
                remote.ask("sources", remote.address, *addresses)
                for remote in self.remotes
                if remote
            ]
        )
        sources_by_host.append(questions.sources(own_address, addresses))
        if None in sources_by_host:
            return ()
        return tuple(
            sorted({address for sources in sources_by_host for address in sources})
        )

    async def reach_again(self, index: int) -> None:
        """Reconnects to a host whose connection was lost.

        Raises:
            LaunchError: The host cannot be used.
        """
        self.remotes[index] = await self._connect(self._job.hosts[index], retry=True)

    def python(self, index: int) -> str:
        """Returns the Python interpreter of a host."""
        remote = self.remotes[index]
        return remote.python if remote else sys.executable

    async def start(self, index: int, command: Command) -> Process:
        """Starts a command on a host, inside the tunnel if there is one."""
        remote = self.remotes[index]
        if self.tunnel:
            package = remote.package if remote else _PACKAGE
            command = self.tunnel.wrap(index, command, package)
        if remote:
            return await remote.start(command)
        return await local.start(self._job.hosts[index].name, command, capture=True)

    def follow(
        self, process: Process, on_output: Look = _pass, on_error: Look = _pass
    ) -> None:
        """Shows the output of a process, and writes it to the host's file.

        Args:
            process: A process that `start` returned.
            on_output: Called with the lines of its standard output.
            on_error: Called with the lines of its standard error.
        """

        def show_output(line: bytes) -> None:
            if not on_output(line):
                self._out.line(process.name, line, sys.stdout)

        def show_error(line: bytes) -> None:
            line, announced, status = line.partition(keeper.ENDED.encode())
            if announced:
                process.has_ended(int(status))
                if not line:
                    return
            self.last[process.name] = line
            if on_error(line):
                return
            if self._job.verbose or not output.is_information(line):
                self._out.line(process.name, line, sys.stderr)
            else:
                self._out.keep(process.name, line)

        for reader, show in zip(
            process.outputs, (show_output, show_error), strict=True
        ):
            assert reader
            pump = asyncio.create_task(_lines(reader, show))
            self._pumps.setdefault(process, []).append(pump)

    async def finish(self, process: Process | None = None) -> None:
        """Shows the last output of a process that has ended; by default, of all."""
        processes = self._pumps if process is None else [process]
        pumps = [pump for p in processes for pump in self._pumps.get(p, ())]
        if pumps:
            await asyncio.wait(pumps, timeout=_LAST_LINES)

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach the hosts' ports."""
        return not self.tunnel and not all(map(is_loopback, self.addresses))

    def say(self, text: str) -> None:
        """Reports a fact."""
        self._out.say(text)

    def note(self, text: str) -> None:
        """Reports an action under --verbose."""
        if self._job.verbose:
            self._out.say(text)

    async def _connect(self, host: JobHost, retry: bool) -> Remote | None:
        """Connects to a host; returns None for this host."""
        if host.local:
            return None
        python = self._job.python or sys.executable
        while True:
            try:
                remote = await ssh.connect(host, self._job, python)
                break
            except LaunchError:
                if not retry:
                    raise
                await asyncio.sleep(1)  # the host may be booting
        self._stack.push_async_callback(_close, remote)
        self.note(f"{host.name}: connected")
        return remote

    async def _check(self, remote: Remote | None) -> None:
        if remote:
            await remote.check(self._job, os.getcwd())

    async def _copy(self, remote: Remote | None, packed: bytes, summary: str) -> None:
        if not remote:
            return
        await remote.send(sync.unpacker(), os.getcwd(), packed)
        self._out.say(f"{remote.host.name}: {summary}, copied to {os.getcwd()}")


async def gather(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """Returns the results of all awaitables; the first error cancels the others."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def refuse_exposed(job: Job, remotes: Sequence[Remote]) -> None:
    """Refuses servers that others can reach, unless the user accepts that.

    Raises:
        LaunchError: A server would be exposed, or cannot be reached at all.
    """
    for remote in remotes:
        if not (job.tunnel or (remote.address and remote.own_address)):
            raise LaunchError(
                f"{remote.host.name} is reached through another host, which only "
                "--tunnel supports"
            )
        if not (job.tunnel or job.insecure or is_loopback(remote.address)):
            raise LaunchError(
                f"{remote.host.name}: whoever reaches {remote.address} could run code "
                "there, as TensorFlow's servers ask for no password; --tunnel lets "
                "nobody reach them, --insecure accepts it in a network that you trust"
            )


def is_loopback(address: str) -> bool:
    """Whether an address is one that no other host reaches."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:  # a name
        return address == "localhost"


async def _lines(reader: output.Reader, show: Callable[[bytes], None]) -> None:
    lines = Lines()

    def take(data: bytes) -> None:
        for line in lines.feed(data):
            show(line)

    await output.pump(reader, take)
    for line in lines.flush():
        show(line)


async def _close(remote: Remote) -> None:
    remote.connection.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2):
            await remote.connection.wait_closed()
