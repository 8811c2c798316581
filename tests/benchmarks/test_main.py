"""`python -m benchmarks` runs programs one after the other, and then the report."""

import pytest

from tests.benchmarks.helpers import run


@pytest.mark.slow
def test_a_program_and_the_report_run(tmp_path):
    done = run("benchmarks", "--quick", "--only=allreduce", f"--results_dir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "allreduce took" in done.stderr and "report took" in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "RESULTS.md",
        "allreduce.json",
        "plots",
    }


@pytest.mark.parametrize("flag", ["--only=step", "steps"])
def test_an_unknown_program_is_one_line(flag):
    done = run("benchmarks", flag)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: unknown: ")
