"""Runs the benchmarks: `python -m benchmarks [--only=steps,build] [--quick]`.

Each in a process of its own; then benchmarks.report writes what RESULTS.md says.
"""

from __future__ import annotations

import subprocess
import sys
import time

from absl import app, flags

from benchmarks import cli

# In the order of RESULTS.md.
PROGRAMS = ("steps", "scaling", "allreduce", "build", "memory", "xla", "loops")


def main(argv: list[str]) -> None:
    """Runs what --only names, one after the other."""
    cli.refuse_arguments(argv)
    handed_on = [f"--{flag.name}={flag.value}" for flag in _handed_on()]
    for name in [*cli.chosen(PROGRAMS), "report"]:
        start = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", *handed_on]
        status = subprocess.run(command, cwd=cli.REPOSITORY, check=False).returncode
        if status:
            cli.fail(f"benchmarks.{name} ended with status {status}")
        cli.progress(f"{name} took {time.monotonic() - start:.0f} s\n")


def _handed_on() -> list[flags.FlagHolder]:
    return [
        flag
        for flag in (cli.QUICK, cli.STEPS, cli.ROUNDS, cli.RESULTS_DIR)
        if flag.value is not None
    ]


if __name__ == "__main__":
    app.run(main)
