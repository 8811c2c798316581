# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks` runs programs one after the other, and then the report."""

import subprocess
import sys

import pytest

from tests.benchmarks.helpers import REPOSITORY, run


@pytest.mark.slow
def test_a_program_and_the_report_run(tmp_path):
    result = run(
        "benchmarks", "--quick", "--only=allreduce", f"--results_dir={tmp_path}"
    )
    assert result.returncode == 0, result.stderr
    assert "allreduce took" in result.stderr and "report took" in result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "RESULTS.md",
        "allreduce.json",
        "plots",
    }


@pytest.mark.parametrize("flag", ["--only=step", "steps"])
def test_an_unknown_program_is_one_line(flag):
    command = [sys.executable, "-m", "benchmarks", flag]  # imports no TensorFlow
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: unknown: ")
