# SPDX-License-Identifier: Apache-2.0
"""Runs one command on some host, and leaves nothing of it behind.

Between the launcher and each process that it starts is one of these. The launcher sends
it this source and what to run (`start` in processes.py), so that a host needs nothing
but Python for it: only the standard library is used here. Its standard input is how
the launcher is heard. Lines are `beat` and `end SIGNAL`; if it closes, the launcher is
gone, and the command is ended like by `end 15`.

The command has a session of its own, so that no terminal's Ctrl-C reaches it by itself.
Its descendants, also those that leave its session, become children of this process
(PR_SET_CHILD_SUBREAPER) and are ended with it. If this process is killed, the kernel
kills the command (PR_SET_PDEATHSIG).
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
_CANNOT_RUN = 127  # the status of shells for a command that does not exist
ENDED = "\x1ereplicator.launch: ended "  # what announces the status of the command
# What follows each signal, a grace time apart, until all have ended.
_MORE = {
    signal.SIGINT: (signal.SIGTERM, signal.SIGKILL),
    signal.SIGTERM: (signal.SIGKILL,),
    signal.SIGKILL: (signal.SIGKILL,),
}


class Keeper:
    """Watches one command.

    Args:
        spec: What to run, JSON's types: `argv`; `env`, variables in addition to those
            there are; `cwd`, used if it exists; `stdin`, "null", "pipe" (which closes
            when this process ends) or an open file descriptor; `grace`, seconds between
            a signal and the next; `silence`, seconds without a word of the launcher
            after which it is taken for gone, or None; `stopped`, seconds for which the
            command may be stopped (SIGSTOP) before it is killed, or None; `remove`, a
            folder that is removed at the end, or None; `announce`, whether to say on
            standard error that the command has ended while anything else has not.
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
        self._deadline: float | None = None  # when the next of them is due
        self._stopped_since: float | None = None
        limits = [spec[name] for name in ("silence", "stopped") if spec[name]]
        self._tick = min([1.0, *(limit / 10 for limit in limits)])
        self._heard = self._ticked = time.monotonic()
        self._child = _spawn(spec)

    def run(self) -> int:
        """Returns the status of the command, as shells have it, once all has ended."""
        control: list[int] = [0]
        text = b""
        while True:
            soon = 0.05 if self._deadline is not None else self._tick
            readable, _, _ = select.select([*control, self._wake], [], [], soon)
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake, 4096)
            if 0 in readable:
                data = os.read(0, 4096)
                self._heard = time.monotonic()
                *lines, text = (text + data).split(b"\n")
                for line in lines:
                    self._obey(line)
                if not data:
                    control = []
                    self._end(signal.SIGTERM)
            before = self._status
            if not self._reap():
                assert self._status is not None
                if self._spec["remove"]:
                    shutil.rmtree(self._spec["remove"], ignore_errors=True)
                return self._status
            if self._status != before and self._spec["announce"]:
                _write(f"{ENDED}{self._status}\n")
            self._look_after(time.monotonic(), bool(control))

    def _obey(self, line: bytes) -> None:
        word, _, number = line.partition(b" ")
        if word == b"end":
            self._end(int(number))

    def _on_signal(self, number: int, _: Any) -> None:
        if number != signal.SIGCHLD:
            self._end(signal.SIGTERM)

    def _reap(self) -> bool:
        """Takes note of what has ended; returns whether anything is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid == self._child:
                    code = os.waitstatus_to_exitcode(status)
                    self._status = code if code >= 0 else 128 - code
                    self._next = []  # what it has left behind is ended from the start
                    self._end(signal.SIGTERM)
        except ChildProcessError:  # whoever lives has one of them as its ancestor
            return False

    def _look_after(self, now: float, heard: bool) -> None:
        """Does what is due at a time."""
        if now - self._ticked > 10 * self._tick:  # this process itself was stopped
            self._heard, self._stopped_since = now, None
        self._ticked = now
        silence, stopped = self._spec["silence"], self._spec["stopped"]
        if heard and silence and now - self._heard > silence:
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
        """Begins to end the command, unless that has begun as sternly."""
        if self._deadline is None or number == signal.SIGKILL or not self._next:
            self._next = list(_MORE[signal.Signals(number)])
            self._send(number)

    def _send(self, number: int) -> None:
        """Signals the command, its group, or all that descends from it."""
        again = number == signal.SIGKILL  # for what was forked meanwhile
        self._deadline = time.monotonic() + (0 if again else self._spec["grace"])
        self._next = self._next or [signal.SIGKILL]
        if number == signal.SIGKILL or self._status is not None:
            for pid in descendants():
                _kill(pid, number)
        elif number == signal.SIGINT:  # what a terminal does
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child, number)
        else:  # the command may end its own children as it likes
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
    """Makes this process the command."""
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
            os.kill(pid, signal.SIGCONT)  # one that is stopped would not hear it


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
        if name.isdecimal() and (found := _stat(name)) and found[0] not in "ZX":
            children.setdefault(int(found[1]), []).append(int(name))
    left, found_pids = [os.getpid()], []
    while left:
        more = children.get(left.pop(), [])
        found_pids += more
        left += more
    return found_pids


def _say(text: str) -> None:
    _write(f"replicator.launch: {text}\n")


def _write(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode())


if __name__ == "__main__":
    message = globals().get("given") or json.loads(sys.stdin.readline())
    os._exit(Keeper(message["spec"]).run())
