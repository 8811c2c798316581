# SPDX-License-Identifier: Apache-2.0
"""Shared helpers of the benchmarks' tests."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks import timing
from tests import forks


def measured(*rounds: float) -> timing.Measured:
    """Returns the Measured of a contender with these step times."""
    return timing.Measured(first_call=1.0, losses=(2.0,), rounds=rounds)


def as_dict(*rounds: float) -> dict[str, Any]:
    """Returns the same in its JSON form."""
    return json.loads(json.dumps(dataclasses.asdict(measured(*rounds))))


def by_name(times: Mapping[str, float]) -> dict[str, Any]:
    """Returns what was measured of several contenders, with their step times."""
    return {name: as_dict(seconds) for name, seconds in times.items()}


def results(program: str, folder: pathlib.Path, *flags: str) -> tuple[str, Any]:
    """Runs a program with --quick; returns its output and its measurements.

    It runs in a process of its own, where it may make a MirroredStrategy.
    """
    words = ["-m", f"benchmarks.{program}", "--quick", f"--results_dir={folder}"]
    result = forks.run([*words, *flags], timeout=900)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads((folder / f"{program}.json").read_text())
