# SPDX-License-Identifier: Apache-2.0
"""Checks and measures on the GPUs of this machine: `make gpu-check`.

One GPU is enough: it is split into logical GPUs. Each check runs in its own process, as
each configures TensorFlow; with --processes=N, the tests run in N processes, which take
5 GiB of a GPU each. The report says whether a check passed, failed or did not run, and
why; the log beside it has what the checks print, as they run. Without a GPU nothing
runs, and the status is 0.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_REPORT = "gpu-report.md"
_LIMIT = 4 * 3600  # seconds per check; in one process, the tests take two hours
_PROCESSES = "--processes="
_COUNTS = [str(count) for count in range(1, 65)]
_USAGE = "python -m tools.gpu_check [--processes=N] [REPORT.md]"
# The rooms whose programs run on the devices they name. The others start processes of
# their own, or run nothing.
_ROOMS = (
    *("autodist", "bad_inputs", "compressors", "conformance", "control_flow", "forms"),
    *("graph", "inputs", "interop", "keras", "optimizers", "primitives", "programs"),
    *("step", "strategy", "variables", "writes"),
)


@dataclasses.dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        name: The name in tools/gpu_programs.py, unless there are tests.
        about: What it shows.
        gpus: The minimum number of GPUs.
        tests: Files or folders whose fast tests run on logical GPUs.
    """

    name: str
    about: str
    gpus: int = 1
    tests: tuple[str, ...] = ()


def _tests() -> tuple[str, ...]:
    """Returns the rooms whose programs run on devices, and the files in no room."""
    files = sorted(path.name for path in (ROOT / "tests").glob("test_*.py"))
    return tuple(f"tests/{name}" for name in (*_ROOMS, *files))


CHECKS = (
    Check("nccl", "all_reduce by NCCL equals that by a hub", gpus=2),
    Check("prefetch", "elements are on their GPU when a step begins"),
    Check("mixed_precision", "float16 on GPUs trains as float32 does"),
    Check("memory_growth", "memory grows with what a step needs"),
    Check("step_times", "steps beside one GPU and MirroredStrategy"),
    Check("tests", "the fast tests on logical GPUs", tests=_tests()),
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a check.

    Attributes:
        check: The check.
        status: PASSED, FAILED or NOT_RUN.
        said: The result, or the reason why it did not run.
        failures: Lines that name the tests that failed, and why.
    """

    check: Check
    status: str
    said: str
    failures: tuple[str, ...] = ()


# Runs a command; returns its status and output.
Run = Callable[[Sequence[str]], tuple[int, str]]


def run(log: pathlib.Path, command: Sequence[str]) -> tuple[int, str]:
    """Runs a Python command in the repository; a timeout counts as failure.

    Args:
        log: Where the output is appended, as it comes.
        command: The arguments of Python.

    Returns:
        The status and the output.
    """
    with log.open("ab") as file:
        start = file.tell()
        try:
            status = subprocess.run(
                [sys.executable, "-u", *command],
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return 124, f"it took more than {_LIMIT} s"
    return status, log.read_bytes()[start:].decode(errors="replace")


def outcome(check: Check, gpus: int, run: Run, processes: int = 1) -> Outcome:
    """Runs a check if there are enough GPUs.

    Args:
        check: The check.
        gpus: The number of GPUs.
        run: Runs a command.
        processes: How many run the tests.
    """
    if gpus < check.gpus:
        available = "no GPU" if not gpus else f"{gpus} GPU{'s' * (gpus > 1)}"
        return Outcome(check, NOT_RUN, f"needs {check.gpus}, and there is {available}")
    if check.tests:
        # Always in processes of xdist's: one that crashes is replaced.
        workers = (f"--numprocesses={processes}", "--dist=worksteal")
        options = ("--gpus", "-m", "not slow", *workers, "-v")
        status, printed = run(("-m", "pytest", *options, *check.tests))
    else:
        status, printed = run(("-m", "tools.gpu_programs", check.name))
    lines = printed.strip().splitlines() or ["it printed nothing"]
    failures = tuple(line for line in lines if line.startswith(("FAILED ", "ERROR ")))
    # TensorFlow may write after the summary.
    summaries = [line for line in lines if check.tests and line.startswith("=")]
    said = (summaries or lines)[-1].strip("= ")
    return Outcome(check, FAILED if status else PASSED, said, failures)


def found_gpus(run: Run) -> list[Mapping[str, Any]]:
    """Returns TensorFlow's description of each GPU; none if it finds none, or fails."""
    status, printed = run(("-m", "tools.gpu_programs", "devices"))
    lines = printed.strip().splitlines()
    if status or not lines:
        return []
    try:
        listed = json.loads(lines[-1])
    except ValueError:
        return []
    return listed if isinstance(listed, list) else []


def report(gpus: Sequence[Mapping[str, Any]], outcomes: Sequence[Outcome]) -> str:
    """Returns the report, in Markdown."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    names = [f"- {gpu.get('device_name', 'a GPU')} {_facts(gpu)}" for gpu in gpus]
    counts = {
        status: sum(o.status == status for o in outcomes)
        for status in (PASSED, FAILED, NOT_RUN)
    }
    counts_text = ", ".join(f"{count} {status}" for status, count in counts.items())
    rows = [
        f"| {o.check.name} | {o.check.about} | {o.status} | {_cell(o.said)} |"
        for o in outcomes
    ]
    failures = [f"- {line}" for outcome in outcomes for line in outcome.failures]
    return "\n".join(
        [
            "# GPUs\n",
            f"{now}; {counts_text}.\n",
            *(names or ["TensorFlow finds no GPU on this machine."]),
            "\n| check | shows | status | found |\n| --- | --- | --- | --- |",
            *rows,
            *(["\n## Failures\n", *failures] if failures else []),
            "",
        ]
    )


def _facts(gpu: Mapping[str, Any]) -> str:
    facts = [f"{k} {v}" for k, v in sorted(gpu.items()) if k != "device_name"]
    return f"({', '.join(facts)})" if facts else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def check_all(run: Run, processes: int = 1) -> tuple[str, int]:
    """Runs all checks; returns the report, and the exit status: 1 if any failed."""
    gpus = found_gpus(run)
    outcomes = []
    for check in CHECKS:
        if len(gpus) >= check.gpus:
            print(f"{check.name}: {check.about} ...", file=sys.stderr, flush=True)
        outcomes.append(outcome(check, len(gpus), run, processes))
    failed = any(result.status == FAILED for result in outcomes)
    return report(gpus, outcomes), int(failed)


def main(argv: Sequence[str]) -> int:
    """Runs the checks, prints and writes the report; returns the exit status."""
    processes, rest = "1", list(argv)
    if rest and rest[0].startswith(_PROCESSES):
        processes = rest.pop(0).removeprefix(_PROCESSES)
    if len(rest) > 1 or rest and rest[0].startswith("-") or processes not in _COUNTS:
        print(f"usage: {_USAGE}", file=sys.stderr)
        return 2
    path = pathlib.Path(rest[0] if rest else ROOT / _REPORT)
    if not path.parent.is_dir():
        print(f"there is no folder {path.parent}", file=sys.stderr)
        return 2
    log = path.with_suffix(".log")
    log.write_bytes(b"")
    print(f"the output of the checks is in {log}", file=sys.stderr)
    text, status = check_all(functools.partial(run, log), int(processes))
    path.write_text(text)
    print(f"{text}\nwritten to {path}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
