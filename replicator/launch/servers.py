"""Starts one server on each host, and waits until all say that they are up."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from replicator.launch import commands, local, output, ssh, sync, tunnel
from replicator.launch.commands import Serving
from replicator.launch.flags import Job
from replicator.launch.hosts import Host, LaunchError
from replicator.launch.output import Lines, Output
from replicator.launch.processes import LOST, Process, ending, exit_status
from replicator.launch.shared import Shared
from replicator.launch.ssh import Remote

_HERE = "127.0.0.1"
_PACKAGE = str(pathlib.Path(__file__).parent.parent)


class Servers:
    """The servers of a job, and all that belongs to them.

    Args:
        job: What is launched.
        out: Where their output goes.
        stack: Closes connections and forwards, once they have ended.
        shared: What the program is told meanwhile.

    Attributes:
        processes: Those that were started, also while others are being started.
        cluster: Once `start` has returned: the description of the cluster.
    """

    def __init__(
        self,
        job: Job,
        out: Output,
        stack: contextlib.AsyncExitStack,
        shared: Shared,
    ) -> None:
        self._job, self._out, self._stack = job, out, stack
        self._pumps: list[asyncio.Task[Any]] = []
        self._waiting = [host.name for host in job.hosts]
        self._last: dict[str, bytes] = {}  # what each has said last
        self._tunnel: tunnel.Tunnel | None = None
        self._remotes: list[Remote | None] = []
        self._up: list[Serving | None] = []
        self._client = ""
        self._shared = shared
        self.processes: list[Process] = []
        self.cluster = ""

    async def start(self, retry: bool) -> None:
        """Starts all.

        Args:
            retry: Whether a host that cannot be reached may come back in time.

        Raises:
            LaunchError: One does not start, or not in time.
        """
        try:
            async with asyncio.timeout(self._job.start_timeout):
                await self._start(retry)
        except TimeoutError as error:
            raise LaunchError(
                f"{', '.join(self._waiting)}: not up after "
                f"{self._job.start_timeout:g} seconds; --start-timeout allows more",
                1,
            ) from error

    async def finish(self) -> None:
        """Shows what the servers, which have ended, said last."""
        if self._pumps:
            await asyncio.wait(self._pumps, timeout=1)

    async def _start(self, retry: bool) -> None:
        job = self._job
        remotes = await together([self._connect(host, retry) for host in job.hosts])
        found = [remote for remote in remotes if remote]
        if job.sync and found:
            names, which = await sync.choose(os.getcwd())
            packed = await asyncio.to_thread(sync.pack, os.getcwd(), names)
            said = f"{len(names)} {which}, {len(packed) / 1e6:.1f} MB packed"
            await together([self._copy(remote, packed, said) for remote in found])
        await together([remote.check(job, os.getcwd()) for remote in found])
        client = commands.any_port(found[0].own_address or _HERE if found else _HERE)
        refuse_exposed(job, found)
        if job.tunnel:
            self._tunnel = await tunnel.open_tunnel(remotes, self._stack)
            client = self._tunnel.client
        own = client.rpartition(":")[0]
        addresses = [remote.address if remote else own for remote in remotes]
        self._up = await together(
            [
                self._serve(index, remote, commands.any_port(addresses[index]))
                for index, remote in enumerate(remotes)
            ]
        )
        self._remotes, self._client = remotes, client
        self._describe()

    def _describe(self) -> None:
        self.cluster = commands.describe(
            self._job, self._client, self._up, self._shared.path
        )
        self._shared.describe(self.cluster)

    @property
    def count(self) -> int:
        """How many there are, with those that are being started again."""
        return sum(up is not None for up in self._up)

    @property
    def can_restart(self) -> bool:
        """Whether one can be started without all others: a tunnel is of all."""
        return self._tunnel is None

    async def restart(self, process: Process) -> None:
        """Starts one again that has ended, to listen where it did.

        Raises:
            LaunchError: It does not start, or not in time.
        """
        index = self._index(process)
        host, up = self._job.hosts[index], self._up[index]
        assert up
        self._waiting.append(host.name)
        limit = self._job.start_timeout
        try:
            async with asyncio.timeout(limit):
                if process.status.result() == LOST:
                    self._remotes[index] = await self._connect(host, retry=True)
                await self._serve(index, self._remotes[index], up.address)
        except TimeoutError as error:
            text = f"{host.name}: not up after {limit:g} seconds"
            raise LaunchError(text, 1) from error

    def leave_out(self, process: Process) -> None:
        """Has the program go on without one that has ended, or is not up in time."""
        self._up[self._index(process)] = None
        for own in [own for own in self.processes if own.name == process.name]:
            own.send(f"end {int(signal.SIGKILL)}")  # it may be there, and not be up
            self.processes.remove(own)
        self._describe()

    def _index(self, process: Process) -> int:
        return [host.name for host in self._job.hosts].index(process.name)

    async def _connect(self, host: Host, retry: bool) -> Remote | None:
        """Connects to a host; returns None for this one."""
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
                await asyncio.sleep(1)  # it may be starting
        self._stack.push_async_callback(_close, remote)
        self._note(f"{host.name}: connected")
        return remote

    async def _copy(self, remote: Remote, packed: bytes, said: str) -> None:
        await remote.send(sync.unpacker(), os.getcwd(), packed)
        self._out.say(f"{remote.host.name}: {said}, copied to {os.getcwd()}")

    async def _serve(self, index: int, remote: Remote | None, listen: str) -> Serving:
        """Starts a server, and returns what it says once it is up."""
        job, host = self._job, self._job.hosts[index]
        if self._tunnel:
            listen = self._tunnel.listen(index)
        python = remote.python if remote else sys.executable
        command = commands.server(job, host, listen, python, os.getcwd())
        if self._tunnel:
            package = remote.package if remote else _PACKAGE
            command = self._tunnel.wrap(index, command, package)
        if remote:
            process = await remote.start(command)
        else:
            process = await local.start(host.name, command, capture=True)
        self.processes.append(process)
        up: asyncio.Future[Serving] = asyncio.get_running_loop().create_future()
        self._follow(process, up)
        either: list[asyncio.Future[Any]] = [up, process.status]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            await self.finish()
            status = process.status.result()
            said = ssh.last_line(self._last.get(host.name, b"")) or ending(status)
            text = f"{host.name}: its server has ended before it was up: {said}"
            raise LaunchError(text, exit_status(status) or 1)
        self._waiting.remove(host.name)
        self._note(f"{host.name}: its server is up at {up.result().address}")
        return up.result()

    def _follow(self, process: Process, up: asyncio.Future[Serving]) -> None:
        """Shows what a server writes, but for the line that says that it is up."""

        def show_output(line: bytes) -> None:
            found = None if up.done() else commands.serving(line)
            if found:
                up.set_result(found)
            else:
                self._out.line(process.name, line, sys.stdout)

        def show_error(line: bytes) -> None:
            self._last[process.name] = line
            if self._job.verbose or not output.is_information(line):
                self._out.line(process.name, line, sys.stderr)
            else:
                self._out.keep(process.name, line)

        for reader, show in zip(
            process.outputs, (show_output, show_error), strict=True
        ):
            assert reader
            pumped = _lines(reader, show)
            self._pumps.append(asyncio.create_task(pumped))

    def _note(self, text: str) -> None:
        if self._job.verbose:
            self._out.say(text)


async def together(waited: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Returns the results of all; the first error cancels the others."""
    tasks = [asyncio.ensure_future(one) for one in waited]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def refuse_exposed(job: Job, remotes: Sequence[Remote]) -> None:
    """Refuses servers that others reach, unless they are accepted.

    Raises:
        LaunchError: One would be, or cannot be reached at all.
    """
    for remote in remotes:
        if not (job.tunnel or (remote.address and remote.own_address)):
            raise LaunchError(
                f"{remote.host.name} is reached by way of another host, which only "
                "--tunnel can do"
            )
        if not (job.tunnel or job.insecure or is_loopback(remote.address)):
            raise LaunchError(
                f"{remote.host.name}: whoever reaches {remote.address} could run code "
                "there, as TensorFlow's servers ask for no password; --tunnel lets "
                "nobody reach them, --insecure accepts it in a network that you trust"
            )


def is_loopback(address: str) -> bool:
    """Returns whether an address is one that no other host reaches."""
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
    for line in lines.rest():
        show(line)


async def _close(remote: Remote) -> None:
    remote.connection.close()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(2):
            await remote.connection.wait_closed()
