# SPDX-License-Identifier: Apache-2.0
"""Runs every target that is too long for the gate, in turn: `make long`.

tests/RUNS.md has a row per run: the commit, the date and what came out. A run whose row
has the present commit is done, so an interrupted `make long` goes on with what is left.
`LONG="test-v1 docs-check"` repeats the runs whose names begin so, whatever their rows
say. The output of each run is in .long/.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence

from tools import matrix

ROOT = pathlib.Path(__file__).parents[1]
TABLE = pathlib.Path("tests", "RUNS.md")
LOGS = ".long"
_HEAD = f"""\
# Runs of the long targets

What `make long` wrote (`tools/long_runs.py`): the last run of each target that is too
long for the gate. The commit is the newest that changed anything but this table; a plus
sign says that the tree also had changes that were not committed. Runs that failed name
the first tests that did; their whole output is in `{LOGS}/`, which git ignores.

| run | commit | date | minutes | result |
|---|---|---|---|---|
"""
_OPTIONS = (
    *("variables=mirrored", "variables=sharded", "fusion=False", "factors=False"),
    *("kernels=False", "build=clone", "algorithm=hub", "algorithm=shuffled"),
    *("algorithm=ring", "algorithm=tree", "steps_per_call=True"),
)
_COUNT = re.compile(r"(\d+) (passed|failed|errors?|skipped)\b")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_FAILURE = "**failed**: "
_NAMES = 5  # failed tests that a row names


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
        run: The name of the run.
        commit: Abbreviated, with a plus sign if the tree had other changes.
        date: "2026-11-27".
        minutes: Of wall time.
        result: Counts, and names of failed tests.
    """

    run: str
    commit: str
    date: str
    minutes: str
    result: str


def runs(root: pathlib.Path) -> dict[str, list[str]]:
    """Returns the arguments of make for each run, by its name.

    Large targets are several runs, so that an interruption loses little: slow tests by
    directory, options one by one, each with another tenth of the tests on another day.
    """
    tenth = datetime.date.today().toordinal() % 10
    result = {name: [name] for name in ("test-plain", "test-v1", "docs-check")}
    for option in _OPTIONS:
        result[f"test-options {option}"] = [
            *("test-options", f"OPTIONS={option}", f"PART={tenth}/10"),
        ]
    for part in _parts(root / "tests"):
        result[f"test-long {part}"] = ["test-long", f"TESTS={part}"]
    result |= {name: [name] for name in ("test-hosts", "test-clients", "test-nightly")}
    for version in matrix.PYTHONS:
        for tensorflow in matrix.TENSORFLOWS:
            pair = f"{version}-{tensorflow}"
            result[f"test-matrix {pair}"] = ["test-matrix", f"MATRIX=--only={pair}"]
    return result


def _parts(tests: pathlib.Path) -> list[str]:
    """Returns the directories of tests, and a pattern for the files beside them."""
    folders = sorted({file.parent.relative_to(tests) for file in tests.rglob("test_*")})
    top = sorted({folder.parts[0] for folder in folders if folder.parts})
    return [f"tests/{name}" for name in top if name != "clients"] + ["tests/test_*.py"]


def commit(root: pathlib.Path) -> str:
    """Returns the newest commit that changed anything but the table."""
    others = ["--", ".", f":!{TABLE}"]
    hash_ = _git(root, "log", "-1", "--format=%h", *others)
    return hash_ + ("+" if _git(root, "status", "--porcelain", *others) else "")


def _git(root: pathlib.Path, *arguments: str) -> str:
    command = ["git", *arguments]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def read(text: str) -> dict[str, Row]:
    """Returns the rows of a table, by the names of their runs."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()]
    rows = [Row(*row) for row in cells if len(row) == 5 and row[0] != "run"]
    return {row.run: row for row in rows}


def write(rows: Iterable[Row]) -> str:
    """Returns the table of these rows."""
    lines = ["| " + " | ".join(dataclasses.astuple(row)) + " |\n" for row in rows]
    return _HEAD + "".join(lines)


def result(output: str, status: int) -> str:
    """Returns what a run showed, for its row.

    Args:
        output: What it printed, with the closing line of each pytest.
        status: Its exit status.
    """
    closing = [line for line in output.splitlines() if re.search(r" in [\d.]+s", line)]
    counts: collections.Counter[str] = collections.Counter()
    for number, kind in _COUNT.findall("\n".join(closing)):
        counts[kind.replace("errors", "error")] += int(number)
    text = ", ".join(f"{number} {kind}" for kind, number in counts.items())
    if not status or _is_empty(output):
        return text or _last_line(output) or "passed"
    failed = list(dict.fromkeys(_FAILED.findall(output)))
    more = f" and {len(failed) - _NAMES} more" if len(failed) > _NAMES else ""
    names = ", ".join(name.replace("|", "/") for name in failed[:_NAMES]) + more
    return _FAILURE + (f"{text}: {names}" if failed else _last_line(output))


def _is_empty(output: str) -> bool:
    """Whether pytest found no test, as in a directory without slow ones."""
    return "= no tests ran in" in output and not _FAILED.search(output)


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if not line.startswith("make")]
    return lines[-1].replace("|", "/")[:200] if lines else ""


def run(arguments: Sequence[str], root: pathlib.Path, log: pathlib.Path) -> int:
    """Runs make with arguments; returns its exit status.

    An interruption ends all processes of the run.
    """
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(
            ["make", *arguments],
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait()


def main(chosen: Sequence[str], root: pathlib.Path = ROOT) -> int:
    """Runs what is chosen, or what has no row of this commit.

    Args:
        chosen: Beginnings of the names of runs that are repeated; none for the rest.
        root: The repository.

    Returns:
        The exit status: 1 if a run failed, 2 if no run has such a name.
    """
    every, table = runs(root), root / TABLE
    unknown = [name for name in chosen if not any(r.startswith(name) for r in every)]
    if unknown:
        print(f"No run is called {unknown[0]}: have {', '.join(every)}")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    done, failed = commit(root), False
    for name, arguments in every.items():
        rows = read(table.read_text()) if table.exists() else {}
        if not (name.startswith(tuple(chosen)) if chosen else _open(rows, name, done)):
            continue
        print(f"{name} ...", flush=True)
        start, log = time.monotonic(), root / LOGS / re.sub(r"[^\w.=-]+", "_", name)
        status = run(arguments, root, log)
        minutes = f"{(time.monotonic() - start) / 60:.1f}"
        outcome = result(log.read_text(errors="replace"), status)
        date = str(datetime.date.today())
        rows[name] = Row(name, done, date, minutes, outcome)
        table.write_text(write(rows[n] for n in every if n in rows))
        print(f"{name}: {outcome} ({minutes} minutes)", flush=True)
        failed |= outcome.startswith(_FAILURE)
    return int(failed)


def _open(rows: dict[str, Row], name: str, commit_: str) -> bool:
    return name not in rows or rows[name].commit != commit_ or commit_.endswith("+")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
