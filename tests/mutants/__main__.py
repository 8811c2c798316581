# SPDX-License-Identifier: Apache-2.0
"""Runs tests against seeded bugs, and lists which test finds each of them.

`make mutants`, or `make mutants ONLY="a residual"` for those whose names begin so.
table.toml has the bugs, which are plausible and silent, with the tests that should find
them, from narrow to wide. One bug at a time is put into a copy of the working tree, two
copies are at work, and TABLE.md gets a row for each bug.

A bug that no test of the gate finds shows a hole: what is missing is a test that states
the law it breaks. What finds a bug is not deleted until something else finds it.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib
import multiprocessing
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from typing import NoReturn

import pytest

ROOT = pathlib.Path(__file__).parents[2]
_FILE = pathlib.Path(__file__).parent / "table.toml"
_TABLE = pathlib.Path(__file__).parent / "TABLE.md"
_HEAD = """\
# Seeded bugs and the tests that find them

What `make mutants` wrote: for each bug of [table.toml](table.toml), the first test of
the gate that failed with it, and the seconds until then.

| bug | what it breaks | found by | seconds |
|---|---|---|---|
"""
_FAILED = re.compile(r"^(FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_NO_TESTS = (4, 5)  # pytest's statuses for paths that do not exist or hold no test
_AT_ONCE = 2  # bugs that are tried at a time
# Takes seconds, once for all bugs. Nothing that is ours: a bug may be in it.
_IMPORTED = ("tensorflow", "sonnet", "tf_keras", "hypothesis.extra.numpy")

_tree: pathlib.Path  # of the process


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A bug that changes one place of one file.

    Attributes:
        name: What is done, in a few words.
        file: The path, relative to the repository.
        old: The text that is replaced; it occurs once in the file.
        new: The text that takes its place.
        breaks: What is wrong then, in one sentence.
        tests: Arguments of pytest, run by run, until a test fails.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    tests: tuple[str, ...]

    def put_into(self, text: str) -> str:
        """Returns the text of the file with the bug.

        Raises:
            ValueError: The file has changed: the old text is not there once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.file} has the old text of {self.name} {count} times"
            )
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """Returns all bugs."""
    entries = tomllib.loads(_FILE.read_text())["mutant"]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


def copy_tree(target: pathlib.Path) -> None:
    """Copies what git tracks, or would, as it is in the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def find(mutant: Mutant, tree: pathlib.Path) -> str:
    """Returns the first test that fails with a bug, or that none does.

    Args:
        mutant: The bug.
        tree: A copy of the repository, which is left as it was.
    """
    path = tree / mutant.file
    original = path.read_text()
    path.write_text(mutant.put_into(original))
    try:
        found = next(filter(None, (_failed(t, tree) for t in mutant.tests)), None)
    finally:
        path.write_text(original)
    return found or f"**survives** {', '.join(mutant.tests)}"


def _failed(tests: str, tree: pathlib.Path) -> str | None:
    """Returns the first test that fails; what happened, if pytest does not say."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            _run(tests, tree, output.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        output.seek(0)
        text = output.read()
    if status in _NO_TESTS:
        raise ValueError(f"no test of the gate is in {tests}:\n{text}")
    if not status:
        return None
    if (match := _FAILED.search(text)) is None:
        return f"{tests} ends with status {status}"
    return match[2] + (" (error)" if match[1] == "ERROR" else "")


def _run(tests: str, tree: pathlib.Path, output: int) -> NoReturn:
    """Becomes a run of pytest; called in a fork that has imported TensorFlow only."""
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}
    sys.path[:0] = [str(tree)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    status = pytest.main(["-x", "-m", "not slow or gate", *tests.split()])
    sys.stdout.flush()
    os._exit(status)


def _worker(folder: str) -> None:
    """Prepares a process that tries bugs."""
    global _tree
    _tree = pathlib.Path(tempfile.mkdtemp(dir=folder))
    copy_tree(_tree)


def _tried(mutant: Mutant) -> str:
    """Returns the row of a bug."""
    start = time.monotonic()
    found = find(mutant, _tree).replace("|", "/")
    seconds = f"{time.monotonic() - start:.0f}"
    return f"| {mutant.name} | {mutant.breaks} | {found} | {seconds} |\n"


def write(rows: dict[str, str]) -> None:
    """Writes the table, in the order of the bugs."""
    _TABLE.write_text(
        _HEAD + "".join(rows[m.name] for m in mutants() if m.name in rows)
    )


def read() -> dict[str, str]:
    """Returns the rows of the table, by the names of the bugs."""
    text = _TABLE.read_text() if _TABLE.exists() else ""
    lines = text.partition("|---|")[2].splitlines(keepends=True)[1:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def _chosen(beginnings: Sequence[str]) -> list[Mutant]:
    chosen = [m for m in mutants() if m.name.startswith(tuple(beginnings or [""]))]
    if not chosen:
        raise ValueError(f"no bug has a name that begins with {', '.join(beginnings)}")
    return chosen


def main(beginnings: Sequence[str]) -> int:
    """Tries the bugs whose names begin so, or all; returns 1 if one is not found."""
    chosen = _chosen(beginnings)
    for mutant in chosen:  # before the first run, which takes a while
        mutant.put_into((ROOT / mutant.file).read_text())
    for name in _IMPORTED:
        importlib.import_module(name)
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(
            _AT_ONCE, multiprocessing.get_context("fork"), _worker, (folder,)
        ) as pool,
    ):
        tries = {pool.submit(_tried, mutant): mutant for mutant in chosen}
        for done in concurrent.futures.as_completed(tries):
            rows.append(done.result())
            print(rows[-1], end="", flush=True)
            write(read() | {tries[done].name: rows[-1]})
    return int(any("| **" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
