# SPDX-License-Identifier: Apache-2.0
"""What the programs share as programs: flags, errors of one line, processes.

The flags stand here, once, so that several programs can be imported together.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags

from benchmarks import results
from benchmarks.tables import Table

FOLDER = pathlib.Path(__file__).parent
REPOSITORY = FOLDER.parent

QUICK = flags.DEFINE_bool(
    "quick", False, "Few steps of what is small: does everything run?"
)
ONLY = flags.DEFINE_list("only", None, "What to measure; by default everything.")
STEPS = flags.DEFINE_integer(
    "steps", None, "Timed steps of each; by default enough for each.", lower_bound=1
)
ROUNDS = flags.DEFINE_integer(
    "rounds", None, "How often contenders take turns; by default 20.", lower_bound=1
)
CELL = flags.DEFINE_string(
    "cell", None, "Measure one cell of the table, in this process; for the program."
)
RESULTS_DIR = flags.DEFINE_string(
    "results_dir",
    None,
    "Where the JSON files are; by default benchmarks/results, and its folder quick/ "
    "for quick results.",
)


def results_dir() -> pathlib.Path:
    """Returns the folder of the JSON files."""
    default = FOLDER / "results" / ("quick" if QUICK.value else "")
    return pathlib.Path(RESULTS_DIR.value or default)


def steps(by_default: int) -> int:
    """Returns how many steps to time of each contender."""
    return STEPS.value or (2 if QUICK.value else by_default)


def rounds() -> int:
    """Returns how often contenders take turns."""
    return ROUNDS.value or (2 if QUICK.value else 20)


def fail(message: str) -> NoReturn:
    """Ends the program with one line on stderr."""
    sys.exit(f"error: {message}")


def refuse_arguments(argv: Sequence[str]) -> None:
    """Fails if there are arguments that are no flags."""
    if len(argv) > 1:
        fail(f"unknown: {', '.join(argv[1:])}; give what you want as flags, see --help")


def choose(wanted: Iterable[str] | None, have: Iterable[str]) -> list[str]:
    """Returns what was asked for, in the order in which it is listed.

    Args:
        wanted: The names; None: all.
        have: All names there are.
    """
    have = list(have)
    wanted = have if wanted is None else list(wanted)
    unknown = [name for name in wanted if name not in have]
    if unknown or not wanted:
        fail(f"unknown: {', '.join(unknown) or 'nothing'}; have {', '.join(have)}")
    return [name for name in have if name in wanted]


def chosen(have: Iterable[str]) -> list[str]:
    """Returns what --only asks for."""
    return choose(ONLY.value, have)


def numbers(flag: str, given: Iterable[str] | None) -> list[int] | None:
    """Returns the whole numbers from 1 on that a flag lists, or None if there are none.

    Args:
        flag: Its name.
        given: Its value.
    """
    if given is None:
        return None
    given = list(given)
    if not given or not all(number.isdecimal() and int(number) for number in given):
        fail(f"--{flag}={','.join(given)}: give numbers from 1 on, as in --{flag}=1,2")
    return [int(number) for number in given]


def handed_on(*chosen: flags.FlagHolder) -> list[str]:
    """Returns flags as arguments for another program; those that have a value."""
    return [f"--{f.name}={f.value}" for f in chosen if f.value is not None]


def progress(message: str) -> None:
    """Says what is being measured, at once."""
    print(message, file=sys.stderr, flush=True)


def finish(name: str, about: Any, found: Any, made: Iterable[Table]) -> None:
    """Ends a program: prints its tables and writes its JSON file.

    Args:
        name: Of the program.
        about: What `results.facts` returned before anything was measured.
        found: What was measured.
        made: Its tables.
    """
    for table in made:
        table.show()
    progress(f"written to {results.write(results_dir(), name, about, found)}")


def apart(module: str, *arguments: str, **options: Any) -> Any:
    """Runs a program in a process of its own; see `run_apart`.

    Returns:
        What its last line of output says, as JSON.
    """
    return json.loads(run_apart(module, *arguments, **options).splitlines()[-1])


def run_apart(
    module: str,
    *arguments: str,
    timeout: int = 1200,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs a program in a process of its own.

    Args:
        module: To run with python -m.
        *arguments: What to hand it.
        timeout: In seconds.
        environment: Variables that are added to this process's.

    Returns:
        What it printed.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        fail(f"{' '.join(command[1:])} takes more than {timeout} s")
    if done.returncode or not done.stdout:
        sys.stderr.write(done.stderr)
        fail(f"{' '.join(command[1:])} failed with status {done.returncode}")
    return done.stdout
