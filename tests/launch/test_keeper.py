# SPDX-License-Identifier: Apache-2.0
"""A command under a keeper: its status, its end, and its remaining processes."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from replicator.launch import local, output
from replicator.launch.commands import Command
from replicator.launch.processes import Process

_T = TypeVar("_T")


def _run(main: Callable[..., Coroutine[Any, Any, _T]]) -> _T:
    """Runs a coroutine, which gets a function that starts processes."""
    started: list[Process] = []

    async def start(command: Command) -> Process:
        started.append(await local.start("x", command, True))
        return started[-1]

    async def limited() -> _T:
        try:
            async with asyncio.timeout(60):
                return await main(start)
        finally:
            for process in started:
                process.abandon()

    return asyncio.run(limited())


def _command(script: str, **options: Any) -> Command:
    argv = (sys.executable, "-u", "-c", script)
    return Command(argv, {}, "/", **{"grace": 0.3, **options})


async def _said(process: Process) -> bytes:
    """Returns all output of the command."""
    pieces: list[bytes] = []
    assert process.outputs[0]
    await output.pump(process.outputs[0], pieces.append)
    return b"".join(pieces)


async def _line(process: Process) -> bytes:
    """Returns the first line of the command's output."""
    reader = process.outputs[0]
    assert isinstance(reader, asyncio.StreamReader)
    return await reader.readline()


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("raise SystemExit(255)", 255),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 2)", 130),
    ],
)
def test_status(script: str, status: int) -> None:
    async def main(start: Any) -> int:
        return await (await start(_command(script))).status

    assert _run(main) == status


def test_a_command_that_is_not_there() -> None:
    async def main(start: Any) -> tuple[int, bytes]:
        command = Command(("/no/such", "x"), {}, "/")
        process = await start(command)
        assert process.outputs[1]
        return await process.status, await process.outputs[1].read(1000)

    assert _run(main) == (
        127,
        b"replicator.launch: /no/such: No such file or directory\n",
    )


def test_environment_folder_and_session() -> None:
    script = (
        "import os; print(os.getcwd(), os.environ['A'], os.getsid(0) == os.getpid())"
    )

    async def main(folder: str, start: Any) -> bytes:
        argv = (sys.executable, "-c", script)
        command = Command(argv, {"A": "b c"}, folder)
        return await _said(await start(command))

    assert _run(functools.partial(main, "/usr")) == b"/usr b c True\n"
    # If the folder does not exist, it stays in its own.
    assert (
        _run(functools.partial(main, "/no/such"))
        == f"{os.getcwd()} b c True\n".encode()
    )


def test_signals_are_not_ignored_in_a_command() -> None:
    """Python ignores some itself, which its children would inherit."""

    async def main(start: Any) -> bytes:
        argv = ("/bin/cat", "/proc/self/status")
        return await _said(await start(Command(argv, {}, "/")))

    (line,) = [li for li in _run(main).splitlines() if li.startswith(b"SigIgn")]
    ignored = int(line.split()[1], 16)
    # The C library reserves some: nobody can change those, and children inherit an
    # ancestor's setting.
    assert not [n for n in signal.valid_signals() if ignored >> (n - 1) & 1]


_FAMILY = (
    "import os, signal, time\n"
    "told, telling = os.pipe()\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "    if os.fork() == 0:\n"
    "        os.write(telling, str(os.getpid()).encode())\n"
    "    time.sleep(1000)\n"
    "print(os.read(told, 100).decode())\n"
)


@pytest.mark.parametrize("rest", ["", "time.sleep(1000)", "os._exit(4)"])
def test_descendants_end_with_it(rest: str) -> None:
    async def main(start: Any) -> tuple[int, int]:
        process = await start(_command(_FAMILY + rest))
        grandchild = int(await _line(process))
        if "sleep" in rest:
            await process.end(signal.SIGTERM, 30)
        return await process.status, grandchild

    status, grandchild = _run(main)
    assert status == {"": 0, "time.sleep(1000)": 143, "os._exit(4)": 4}[rest]
    with pytest.raises(ProcessLookupError):
        os.kill(grandchild, 0)


_TELLS = (
    "import signal, time\n"
    "for number in (2, 15):\n"
    "    signal.signal(number, lambda number, _: print(number))\n"
    "print('ready')\n"
    "while True:\n"
    "    time.sleep(1000)\n"
)


@pytest.mark.parametrize(
    ("number", "heard"), [(2, b"2\n15\n"), (15, b"15\n"), (9, b"")]
)
def test_sterner_signals_follow(number: int, heard: bytes) -> None:
    async def main(start: Any) -> tuple[bytes, int]:
        process = await start(_command(_TELLS))
        await _line(process)
        await process.end(number, 30)
        return await _said(process), await process.status

    assert _run(main) == (heard, 137)


def test_a_stopped_command_is_ended() -> None:
    async def main(start: Any) -> int:
        script = "import os; os.kill(os.getpid(), 19)"
        return await (await start(_command(script, stopped=0.2))).status

    assert _run(main) == 137


def test_a_stopped_command_hears_signals() -> None:
    async def main(start: Any) -> int:
        script = "import os; print('ready'); os.kill(os.getpid(), 19)"
        process = await start(_command(script, grace=1000))
        await _line(process)
        await process.end(signal.SIGTERM, 30)
        return await process.status

    # It may have been continued just before it stops: then it ends by itself.
    assert _run(main) == 143
