# SPDX-License-Identifier: Apache-2.0
"""Runs cases in separate processes, which may hang or die.

A worker reads the numbers of cases from its standard input and answers each with a line
on a separate pipe: a case may close the standard output. Cases that begin before
TensorFlow has initialized devices run in forks of a worker that has not.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

ROOT = pathlib.Path(__file__).parents[2]
_MEMORY = 4 << 30  # bytes of address space that a case may add
_START = 300  # seconds for the start of a worker
_GRACE = 15  # seconds beyond a case's own limit


def run(
    count: int,
    seed: int,
    only: str = "",
    tell: Callable[[str, str], None] = lambda name, verdict: None,
) -> dict[str, str]:
    """Runs cases; returns the verdict of each, by its name.

    Args:
        count: The number of cases.
        seed: The seed of the sample.
        only: Runs all cases whose names contain this.
        tell: Called with each verdict.
    """
    from tests.bad_inputs import cases

    chosen = cases.sample(count if not only else 10**9, seed)
    chosen = [case for case in chosen if only in case.name][:count]
    verdicts = {}
    for cold in (False, True):
        names = [case.name for case in chosen if case.cold == cold]
        for name, verdict in _run_all(names, cold):
            verdicts[name] = verdict
            tell(name, verdict)
    return verdicts


def summary(verdicts: dict[str, str]) -> str:
    """Returns the number of verdicts of each kind."""
    kinds = collections.Counter(v.partition(":")[0] for v in verdicts.values())
    return ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))


def _run_all(names: Sequence[str], cold: bool):  # type: ignore[no-untyped-def]
    """Yields each case with its verdict; restarts a worker whenever it dies."""
    from tests.bad_inputs import judge

    waiting = collections.deque(names)
    while waiting:
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "tests.bad_inputs.workers", str(writer)]
        process = subprocess.Popen(
            [*command, "cold"] if cold else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[writer],
            start_new_session=True,  # with its forks, which may hang
            cwd=ROOT,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)},
        )
        os.close(writer)
        assert process.stdin is not None
        try:
            with os.fdopen(reader, "rb", buffering=0) as answers:
                if _line(answers, _START) is None:
                    raise RuntimeError("a worker does not start")
                while waiting:
                    name = waiting.popleft()
                    process.stdin.write(json.dumps(name).encode() + b"\n")
                    process.stdin.flush()
                    answer = _line(answers, judge.WALL + _GRACE)
                    if answer is None:
                        yield name, f"BAD: hangs, or dies ({process.poll()})"
                        break
                    yield name, json.loads(answer)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _line(answers, seconds: float) -> bytes | None:  # type: ignore[no-untyped-def]
    """Returns the next line of a pipe, or None on timeout."""
    line = b""
    end = time.monotonic() + seconds
    while not line.endswith(b"\n"):
        left = max(end - time.monotonic(), 0)
        if not select.select([answers], [], [], left)[0]:
            return None
        byte = answers.read(1)
        if not byte:
            return None
        line += byte
    return line


def _serve(writer: int, cold: bool) -> None:
    """Runs the cases read from standard input."""
    import tensorflow as tf

    import tests.bad_inputs.cases as cases
    from tests.bad_inputs import judge

    os.chdir(tempfile.mkdtemp())
    by_name = {case.name: case for case in cases.every()}
    if not cold:
        cpu = tf.config.list_physical_devices("CPU")[0]
        split = [tf.config.LogicalDeviceConfiguration()] * 8
        tf.config.set_logical_device_configuration(cpu, split)
        tf.constant(1.0)
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
    limit = used * resource.getpagesize() + _MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    os.write(writer, b"ready\n")
    for line in os.fdopen(os.dup(0), "rb"):
        case = by_name[json.loads(line)]
        verdict = _forked(judge.run, case) if cold else judge.run(case)
        os.write(writer, json.dumps(verdict).encode() + b"\n")


def _forked(function, case) -> str:  # type: ignore[no-untyped-def]
    """Returns a function's result for a case, in a fork of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        verdict = "BAD: dies"
        try:
            verdict = function(case)
        finally:
            os.write(writer, verdict.encode(errors="replace"))
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        verdict = answer.read().decode()
    status = os.waitpid(child, 0)[1]
    return verdict or f"BAD: dies ({status})"


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:] == ["cold"])
