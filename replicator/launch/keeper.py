# SPDX-License-Identifier: Apache-2.0
"""Runs one command on a host, and leaves nothing of it behind.

The launcher runs every command under a keeper process. It sends the keeper this source
and the command (`start` in processes.py), so that a host needs only Python: this file
uses the standard library alone. The launcher controls the keeper through its standard
input, by the lines `beat` and `end SIGNAL`. If the input closes, the launcher is gone,
and the keeper ends the command as for `end 15`.

The command has its own session, so that no terminal's Ctrl-C reaches it directly. Its
descendants, even those that leave its session, become children of the keeper
(PR_SET_CHILD_SUBREAPER) and end with it. If the keeper is killed, the kernel kills the
command (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CANNOT_RUN = 127  # a shell's status for a command that does not exist
ENDED = "\x1ereplicator.launch: ended "  # announces the status of the command
# The signals that follow each signal, a grace time apart, until all have ended.
_MORE = {
    signal.SIGINT: (signal.SIGTERM, signal.SIGKILL),
    signal.SIGTERM: (signal.SIGKILL,),
    signal.SIGKILL: (signal.SIGKILL,),
}


class Keeper:
    """Runs and supervises one command.

    Args:
        spec: The command, in JSON's types: `argv`; `env`, variables to add to the
            environment; `cwd`, used if it exists; `stdin`, "null", "pipe" (which closes
            when this process ends) or an open file descriptor; `grace`, seconds between
            a signal and the next; `silence`, seconds without input after which the
            launcher counts as gone, or None; `stopped`, seconds for which the command
            may be stopped (SIGSTOP) before it is killed, or None; `remove`, a folder to
            remove at the end, or None; `announce`, whether to report the end of the
            command on standard error while its descendants still run.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self._spec = spec
        self._wake, wake = os.pipe()
        os.set_blocking(wake, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        adopt_orphans()
        self._status: int | None = None
        self._next: list[int] = []  # signals still to be sent
        self._deadline: float | None = None  # when the next one is due
        self._stopped_since: float | None = None
        limits = [spec[name] for name in ("silence", "stopped") if spec[name]]
        self._tick = min([1.0, *(limit / 10 for limit in limits)])
        self._last_input = self._ticked = time.monotonic()
        self._child = _spawn(spec)

    def run(self) -> int:
        """Waits until all has ended; returns the command's status, as in a shell."""
        inputs: list[int] = [0]
        text = b""
        while True:
            timeout = 0.05 if self._deadline is not None else self._tick
            readable, _, _ = select.select([*inputs, self._wake], [], [], timeout)
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if 0 in readable:
                data = os.read(0, 4096)
                self._last_input = time.monotonic()
                *lines, text = (text + data).split(b"\n")
                for line in lines:
                    self._obey(line)
                if not data:
                    inputs = []
                    self._end(signal.SIGTERM)
            old_status = self._status
            if not self._reap():
                assert self._status is not None
                if self._spec["remove"]:
                    shutil.rmtree(self._spec["remove"], ignore_errors=True)
                return self._status
            if self._status != old_status and self._spec["announce"]:
                _write(f"{ENDED}{self._status}\n")
            self._look_after(time.monotonic(), bool(inputs))

    def _obey(self, line: bytes) -> None:
        word, _, number = line.partition(b" ")
        if word == b"end":
            self._end(int(number))

    def _on_signal(self, number: int, _: Any) -> None:
        if number != signal.SIGCHLD:
            self._end(signal.SIGTERM)

    def _reap(self) -> bool:
        """Reaps processes that have ended; returns whether any are left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid == self._child:
                    code = os.waitstatus_to_exitcode(status)
                    self._status = code if code >= 0 else 128 - code
                    self._next = []  # its descendants get the whole series of signals
                    self._end(signal.SIGTERM)
        except ChildProcessError:  # no children, and so no other descendants either
            return False

    def _look_after(self, now: float, has_input: bool) -> None:
        """Checks the time limits, and sends a signal that is due."""
        if now - self._ticked > 10 * self._tick:  # this process itself was stopped
            self._last_input, self._stopped_since = now, None
        self._ticked = now
        silence, stopped = self._spec["silence"], self._spec["stopped"]
        if has_input and silence and now - self._last_input > silence:
            self._end(signal.SIGTERM)
        if stopped and self._status is None:
            if not _is_stopped(self._child):
                self._stopped_since = None
            elif self._stopped_since is None:
                self._stopped_since = now
            elif now - self._stopped_since > stopped:
                _say(f"silent for {stopped:g} seconds (it was stopped): killed")
                self._stopped_since = None
                self._end(signal.SIGKILL)
        if self._deadline is not None and now >= self._deadline:
            self._send(self._next.pop(0))

    def _end(self, number: int) -> None:
        """Begins to end the command, unless an equally strong signal has begun it."""
        if self._deadline is None or number == signal.SIGKILL or not self._next:
            self._next = list(_MORE[signal.Signals(number)])
            self._send(number)

    def _send(self, number: int) -> None:
        """Signals the command, its process group, or all descendants."""
        again = number == signal.SIGKILL  # for processes that were forked meanwhile
        self._deadline = time.monotonic() + (0 if again else self._spec["grace"])
        self._next = self._next or [signal.SIGKILL]
        if number == signal.SIGKILL or self._status is not None:
            for pid in descendants():
                _kill(pid, number)
        elif number == signal.SIGINT:  # as a terminal does
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child, number)
        else:  # leaves it to the command to end its own children
            _kill(self._child, number)


def _spawn(spec: dict[str, Any]) -> int:
    """Starts the command; returns its process id."""
    stdin = spec["stdin"]
    if stdin == "null":
        stdin = os.open(os.devnull, os.O_RDONLY)
    elif stdin == "pipe":
        stdin, _ = os.pipe()  # the other end stays open as long as this process lives
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        _become(spec, stdin, keeper)
    except OSError as error:
        _say(f"{error.filename or spec['argv'][0]}: {error.strerror}")
    finally:
        os._exit(_CANNOT_RUN)


def _become(spec: dict[str, Any], stdin: int, keeper: int) -> None:
    """Replaces this forked process by the command."""
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(_CANNOT_RUN)
    signal.set_wakeup_fd(-1)
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    for number in (*numbers, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.dup2(stdin, 0)
    if stdin > 2:
        os.close(stdin)
    with contextlib.suppress(OSError):
        os.chdir(spec["cwd"])
    os.execvpe(spec["argv"][0], spec["argv"], {**os.environ, **spec["env"]})


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
        if number != signal.SIGKILL:
            os.kill(pid, signal.SIGCONT)  # a stopped process would not react


def _stat(pid: int | str) -> list[str]:
    """Returns the state and the parent of a process; [] if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return []


def _is_stopped(pid: int) -> bool:
    return _stat(pid)[:1] == ["T"]


def adopt_orphans() -> None:
    """Makes descendants of this process its children when their own parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[int]:
    """Returns all live processes that descend from this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (stat := _stat(name)) and stat[0] not in "ZX":
            children.setdefault(int(stat[1]), []).append(int(name))
    pending, pids = [os.getpid()], []
    while pending:
        more = children.get(pending.pop(), [])
        pids += more
        pending += more
    return pids


def _say(text: str) -> None:
    _write(f"replicator.launch: {text}\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


if __name__ == "__main__":
    message = globals().get("given") or json.loads(sys.stdin.readline())
    os._exit(Keeper(message["spec"]).run())
