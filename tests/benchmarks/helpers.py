# SPDX-License-Identifier: Apache-2.0
"""Shared helpers of the benchmarks' tests."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import timing
from tests import forks

REPOSITORY = pathlib.Path(__file__).parents[2]


def measured(*rounds: float) -> timing.Measured:
    """Returns the Measured of a contender with these step times."""
    return timing.Measured(first_call=1.0, losses=(2.0,), rounds=rounds)


def as_dict(*rounds: float) -> dict[str, Any]:
    """Returns the same in its JSON form."""
    return json.loads(json.dumps(dataclasses.asdict(measured(*rounds))))


def run(module: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs a program in a process of its own, where it may make a MirroredStrategy."""
    return forks.run(["-m", module, *flags], cwd=REPOSITORY, timeout=900)


def run_code(code: str) -> subprocess.CompletedProcess[bytes]:
    """Runs some lines of Python in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, timeout=300, check=False
    )


def results(module: str, folder: pathlib.Path, *flags: str) -> tuple[str, Any]:
    """Runs a program with --quick; returns its output and its results."""
    result = run(module, "--quick", f"--results_dir={folder}", *flags)
    assert result.returncode == 0, result.stderr
    name = module.rpartition(".")[2]
    return result.stdout, json.loads((folder / f"{name}.json").read_text())


def call(program: ModuleType, **values: Any) -> None:
    """Runs a program in this process, with these values of its flags."""
    flags.FLAGS(["program"])
    with flagsaver.flagsaver(**values):
        program.main(["program"])


def refusal(program: ModuleType, **values: Any) -> str:
    """Returns a program's error for flags that it refuses."""
    with pytest.raises(SystemExit) as ended:
        call(program, **values)
    return ended.value.code
