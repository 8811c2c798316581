# SPDX-License-Identifier: Apache-2.0
"""Command-line parts of the programs: flags, one-line errors, subprocesses.

Flags are defined here, once, so that several programs can be imported together.
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
    "quick", False, "Run few steps of small cases, to see that everything works."
)
ONLY = flags.DEFINE_list("only", None, "What to measure; by default everything.")
STEPS = flags.DEFINE_integer(
    "steps", None, "Timed steps of each; by default enough for each.", lower_bound=1
)
ROUNDS = flags.DEFINE_integer(
    "rounds", None, "How often contenders take turns; by default 20.", lower_bound=1
)
CELL = flags.DEFINE_string(
    "cell", None, "Measure one cell of the table, in this process; for internal use."
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
    """Returns how many steps of each contender are timed."""
    return STEPS.value or (2 if QUICK.value else by_default)


def rounds() -> int:
    """Returns how many turns each contender gets."""
    return ROUNDS.value or (2 if QUICK.value else 20)


def fail(message: str) -> NoReturn:
    """Ends the program with one line on stderr."""
    sys.exit(f"error: {message}")


def refuse_arguments(argv: Sequence[str]) -> None:
    """Fails if there are arguments other than flags."""
    if len(argv) > 1:
        fail(f"unknown: {', '.join(argv[1:])}; pass what you want as flags, see --help")


def choose(wanted: Iterable[str] | None, have: Iterable[str]) -> list[str]:
    """Returns the requested names, in the order of `have`.

    Args:
        wanted: The names; None for all.
        have: All valid names.
    """
    have = list(have)
    wanted = have if wanted is None else list(wanted)
    unknown = [name for name in wanted if name not in have]
    if unknown or not wanted:
        fail(f"unknown: {', '.join(unknown) or 'nothing'}; have {', '.join(have)}")
    return [name for name in have if name in wanted]


def chosen(have: Iterable[str]) -> list[str]:
    """Returns the names that --only selects."""
    return choose(ONLY.value, have)


def numbers(flag: str, given: Iterable[str] | None) -> list[int] | None:
    """Returns the positive integers that a flag lists, or None if it lists none.

    Args:
        flag: The flag's name.
        given: The flag's value.
    """
    if given is None:
        return None
    given = list(given)
    if not given or not all(number.isdecimal() and int(number) for number in given):
        fail(f"--{flag}={','.join(given)}: give numbers from 1 on, as in --{flag}=1,2")
    return [int(number) for number in given]


def handed_on(*chosen: flags.FlagHolder) -> list[str]:
    """Returns the flags that have a value, as arguments for another program."""
    return [f"--{f.name}={f.value}" for f in chosen if f.value is not None]


def progress(message: str) -> None:
    """Prints what is being measured, without buffering."""
    print(message, file=sys.stderr, flush=True)


def finish(name: str, about: Any, found: Any, made: Iterable[Table]) -> None:
    """Ends a program: prints its tables and writes its JSON file.

    Args:
        name: The program's name.
        about: The result of `results.facts` before the measurement.
        found: The measurements.
        made: The tables.
    """
    for table in made:
        table.show()
    progress(f"written to {results.write(results_dir(), name, about, found)}")


def apart(module: str, *arguments: str, **options: Any) -> Any:
    """Runs a program in a process of its own; see `run_apart`.

    Returns:
        The last line of its output, decoded from JSON.
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
        module: The module for python -m.
        *arguments: Its command-line arguments.
        timeout: In seconds.
        environment: Variables added to this process's environment.

    Returns:
        Its standard output.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        process = subprocess.run(
            command,
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={**os.environ, **(environment or {})},
        )
    except subprocess.TimeoutExpired:
        fail(f"{' '.join(command[1:])} took more than {timeout} s")
    if process.returncode or not process.stdout:
        sys.stderr.write(process.stderr)
        fail(f"{' '.join(command[1:])} failed with status {process.returncode}")
    return process.stdout
