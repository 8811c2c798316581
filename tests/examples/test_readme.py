# SPDX-License-Identifier: Apache-2.0
"""The program in README.md runs."""

import os
import pathlib
import re
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]


def test_the_program_in_the_readme_runs_and_learns():
    program = re.search(r"```python\n(.*?)```", (_ROOT / "README.md").read_text(), re.S)
    result = subprocess.run(
        [sys.executable, "-c", program[1]],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(losses) == 4
    assert losses[-1] < min(0.5, losses[0])
