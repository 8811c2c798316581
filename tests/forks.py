# SPDX-License-Identifier: Apache-2.0
"""Runs Python programs in processes that have already imported TensorFlow.

Importing TensorFlow takes seconds; a process that has only imported it can be forked
any number of times, within milliseconds each. TensorFlow's runtime starts in the fork,
so that devices, threads and eager contexts belong to the program alone.

Not for programs that talk to other processes: TensorFlow's servers have crashed in
forks. Environment variables that TensorFlow reads at import, such as
TF_ENABLE_ONEDNN_OPTS, have no effect here. Each of our programs is also run by a test
in an interpreter of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from typing import Any, NoReturn

ROOT = pathlib.Path(__file__).parents[1]
LIMIT = 300  # seconds; machines may be busy
# In absl's form, or in the one that TensorFlow's oldest supported release still has.
_LOG = re.compile(
    r"[IWE]\d{4} \d|\d{4}-\d\d-\d\d \S+: [IWE] |WARNING: All log messages before absl"
    r"|To enable the following instructions: "
)

_CONTEXT = multiprocessing.get_context("forkserver")
# Tests of imports alone start interpreters of their own.
_CONTEXT.set_forkserver_preload(["replicator", "matplotlib.figure", "sklearn.datasets"])


def run(
    command: Sequence[Any],
    env: Mapping[str, str] | None = None,
    cwd: os.PathLike[str] | str = ROOT,
    timeout: float = LIMIT,
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end, and returns its status and output.

    Args:
        command: What follows `python`: a file, `-m` and a module, or `-c` and code;
            then arguments.
        env: Its environment; None: that of this process.
        cwd: Its working directory.
        timeout: In seconds.
    """
    started = start(command, env, cwd)
    out, err = started.communicate(timeout)
    assert started.returncode is not None
    return subprocess.CompletedProcess(started.args, started.returncode, out, err)


def start(
    command: Sequence[Any],
    env: Mapping[str, str] | None = None,
    cwd: os.PathLike[str] | str = ROOT,
) -> Started:
    """Starts a program; the arguments are those of `run`."""
    return Started([*map(str, command)], dict(env or os.environ), str(cwd))


def own_lines(stderr: str) -> list[str]:
    """Returns the lines that a program wrote, without those of TensorFlow's log.

    How much TensorFlow logs as it starts, that there are no CUDA drivers for example,
    depends on its version and on the machine.
    """
    return [line for line in stderr.splitlines() if not _LOG.match(line)]


class Started:
    """A running program: the tested subset of `subprocess.Popen`, with three pipes."""

    def __init__(self, args: list[str], env: dict[str, str], cwd: str) -> None:
        self.args = args
        (its_in, ours_in), out, err = os.pipe(), os.pipe(), os.pipe()
        its = [its_in, out[1], err[1]]
        self.stdin = os.fdopen(ours_in, "w")
        self.stdout, self.stderr = os.fdopen(out[0]), os.fdopen(err[0])
        self._process = _CONTEXT.Process(
            target=_main, args=(args, env, cwd, [*map(_Given, its)]), daemon=True
        )
        self._process.start()
        for fd in its:
            os.close(fd)
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, minus the number of a signal, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns the exit status, or None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end; returns the exit status."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for its end; returns its output."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        wrote = ["", ""]

        def read(number: int) -> None:
            wrote[number] = (self.stdout, self.stderr)[number].read()

        readers = [
            threading.Thread(target=read, args=(k,), daemon=True) for k in (0, 1)
        ]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return wrote[0], wrote[1]

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it runs."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Started:
        return self

    def __exit__(self, *error: object) -> None:
        self.communicate()


class _Given:
    """A file descriptor that is passed to a process at its start."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __reduce__(self) -> Any:
        return _detached, (reduction.DupFd(self.fd),)


def _detached(fd: Any) -> int:
    return fd.detach()


# --- In the new process ---------------------------------------------------------------


def _main(args: list[str], env: dict[str, str], cwd: str, fds: list[int]) -> NoReturn:
    """Becomes the program."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0, closefd=False)
    by_line = 1 if "PYTHONUNBUFFERED" in env else -1
    sys.stdout = open(1, "w", closefd=False, buffering=by_line)
    sys.stderr = open(2, "w", closefd=False, buffering=1)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    paths = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:1] = [path for path in paths if path not in sys.path]
    status = _status_of(args)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _status_of(args: list[str]) -> int:
    """Runs the command; returns the exit status by Python's rules."""
    try:
        _run(args)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.last_type, sys.last_value = type(error), error
        sys.last_traceback = error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _run(args: list[str]) -> None:
    """Acts as `python ARGUMENT...`."""
    sys.orig_argv = [sys.executable, *args]
    if args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        sys.path[0] = ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(args[1], "<string>", "exec"), vars(main))
    elif args[0] == "-m":
        sys.argv = args[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        sys.path[0] = os.path.dirname(os.path.abspath(args[0]))
        runpy.run_path(args[0], run_name="__main__")
