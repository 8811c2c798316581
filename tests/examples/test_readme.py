# SPDX-License-Identifier: Apache-2.0
"""The programs in README.md run, in their order, and learn."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[2]


def test_the_programs_in_the_readme_run_and_learn() -> None:
    text = (_ROOT / "README.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) == 2
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(programs)],
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert not re.search(r"WARNING:(absl|tensorflow)|\bWARNING: \[", result.stderr)
    of_fit = [float(loss) for loss in re.findall(r"loss: ([\d.]+)", result.stdout)]
    assert len(of_fit) == 10 and of_fit[-1] < min(0.5, of_fit[0])
    of_steps = [float(loss) for loss in re.findall(r"loss ([\d.]+)", result.stdout)]
    assert len(of_steps) == 5 and of_steps[-1] < min(0.5, of_steps[0])
