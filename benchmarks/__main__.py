# SPDX-License-Identifier: Apache-2.0
"""Runs the benchmarks: `python -m benchmarks [--only=steps,build] [--quick]`.

Each runs in its own process; benchmarks.report then writes RESULTS.md.
"""

from __future__ import annotations

import subprocess
import sys
import time

from absl import app

from benchmarks import cli

# In the order of RESULTS.md.
PROGRAMS = (
    "steps",
    "scaling",
    "allreduce",
    "at_work",
    "build",
    "doors",
    "memory",
    "xla",
    "loops",
    "strategies",
    "embedding",
    "fit",
    "normalization",
    "profile",
)


def main(argv: list[str]) -> None:
    """Runs the programs that --only names, one after the other."""
    cli.refuse_arguments(argv)
    arguments = cli.handed_on(cli.QUICK, cli.STEPS, cli.ROUNDS, cli.RESULTS_DIR)
    for name in [*cli.chosen(PROGRAMS), "report"]:
        start = time.monotonic()
        command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        status = subprocess.run(command, cwd=cli.REPOSITORY, check=False).returncode
        if status:
            cli.fail(f"benchmarks.{name} ended with status {status}")
        cli.progress(f"{name} took {time.monotonic() - start:.0f} s\n")


if __name__ == "__main__":
    app.run(main)
