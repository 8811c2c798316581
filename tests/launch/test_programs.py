# SPDX-License-Identifier: Apache-2.0
"""The addresses that all programs get; the hosts are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import pytest

from replicator.launch import ports
from replicator.launch.commands import Command
from replicator.launch.flags import Job
from replicator.launch.hosts import JobHost
from replicator.launch.programs import Programs


class _Process:
    """A process that keeps running."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.status = asyncio.get_running_loop().create_future()


class _Machines:
    """Hosts with one address."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self.remotes = [None for _ in job.hosts]
        self.addresses = ["10.0.0.1" for _ in job.hosts]
        self.sources = ()
        self.tunnel = None
        self.told: list[Any] = []

    @contextlib.asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        yield

    async def reach(self, retry: bool) -> None: ...

    def python(self, index: int) -> str:
        return "python"

    async def start(self, index: int, command: Command) -> _Process:
        self.told.append(json.loads(command.env["REPLICATOR_CLUSTER"]))
        return _Process(self._job.hosts[index].name)

    def follow(self, process: _Process, on_error: Any) -> None: ...

    async def run_all(self, waited: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        return list(await asyncio.gather(*waited))

    def note(self, text: str) -> None: ...


def test_no_port_is_given_to_two(monkeypatch: pytest.MonkeyPatch) -> None:
    actual = iter([5, 5, 6, 7])
    monkeypatch.setattr(ports, "free_port", lambda: next(actual))
    job = Job((JobHost("a"), JobHost("b")), "", ("train.py",))

    async def start() -> list[Any]:
        machines: Any = _Machines(job)
        await Programs(job, machines, 0).start(retry=False)
        return machines.told

    announced = asyncio.run(start())
    assert [one["task"] for one in announced] == [0, 1]
    for one in announced:
        assert [host["address"] for host in one["hosts"]] == [
            "10.0.0.1:6",
            "10.0.0.1:7",
        ]
