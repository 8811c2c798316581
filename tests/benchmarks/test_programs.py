# SPDX-License-Identifier: Apache-2.0
"""Every program measures all that it promises, and refuses in one line the rest."""

from __future__ import annotations

import importlib
import pathlib
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver

from benchmarks import (
    allreduce,
    at_work,
    build,
    cli,
    contenders,
    doors,
    embedding,
    fit,
    loops,
    normalization,
    strategies,
)
from benchmarks.contenders import BASELINE, OURS, RIVAL
from tests import forks
from tests.benchmarks.helpers import results

_SUMS = [BASELINE, RIVAL, OURS]
_ALGORITHMS = [f"{OURS}, {name}" for name in allreduce.CPU_ALGORITHMS]
_STEPS = [*contenders.factories(contenders.ONE_REPLICA, OURS, contenders.MIRRORED)]
_XLA = [f"{name}{more}" for name in (BASELINE, OURS) for more in ("", ", XLA")]
# The program, its flags, where what it measured is, of whom, and what it prints.
_RUNS = [
    (
        "allreduce",
        "--only=1KiB",
        "1KiB",
        [allreduce.BASELINE, *_SUMS[1:], *_ALGORITHMS],
    ),
    ("at_work", "--only=1MiB", "1MiB", [BASELINE, at_work.THREE_SUMS, RIVAL, OURS]),
    ("build", "--build_counts=2", "small", [*build.QUICK["small"]]),
    ("doors", "", "2", [*doors.DOORS]),
    ("embedding", "--onednn=off", "off", [BASELINE, *embedding.BUILDERS]),
    ("fit", "--only=small", "off small", [*fit.NAMES]),
    ("loops", "--only=1", "1", [*loops.STEPS]),
    ("normalization", "--onednn=on", "on 4", [*normalization.NAMES]),
    ("profile", "--only=deep", "deep", ["1", "2", "4"]),
    ("scaling", "--only=large --replica_counts=1", "large 1", [OURS]),
    ("steps", "--only=small --onednn=off", "off small", _STEPS),
    ("xla", "--only=small", "small", _XLA),
]


@pytest.mark.parametrize(
    ("program", "words", "place", "names"),
    [
        pytest.param(*row, id=row[0], marks=[pytest.mark.slow][row[0] == "steps" :])
        for row in _RUNS
    ],
)
def test_it_measures_all_contenders(
    program: str, words: str, place: str, names: list[str], tmp_path: pathlib.Path
) -> None:
    printed, facts = results(program, tmp_path, *words.split())
    found = facts["results"]
    for key in place.split():
        found = found[key]
    assert [name for name in found if name in names] == names
    (table, *_) = importlib.import_module(f"benchmarks.{program}").tables(
        facts["results"]
    )
    assert table.title in " ".join(printed.split())  # which is wrapped
    assert {"command", "time", "machine", "cores", "load", "versions"} <= facts.keys()


@pytest.mark.slow
def test_memory_of_two_components_is_twice_that_of_one(tmp_path: pathlib.Path) -> None:
    printed, facts = results("memory", tmp_path, "--units=1024")
    found = facts["results"]
    counted = {name: by_kind["counted"] for name, by_kind in found.items()}
    assert counted[contenders.MIRRORED] == counted[RIVAL] == 2 * counted[BASELINE]
    assert counted[OURS] < 0.52 * counted[RIVAL]  # in parts
    for by_kind in found.values():
        assert 0.9 * by_kind["counted"] < by_kind["resident"] <= by_kind["peak"]
    assert "resident / mirrored" in printed


@pytest.mark.slow
def test_all_strategies_send_what_is_predicted(tmp_path: pathlib.Path) -> None:
    flags = "--only=small", "--onednn=off"
    _, facts = results("strategies", tmp_path, *flags)
    found = facts["results"]["off"]["small"]
    assert list(found) == [BASELINE, *strategies.BUILDERS]
    assert all(found[name]["nbytes"] > 0 for name in strategies.BUILDERS)
    assert found["PS"]["nbytes"] == found["PSLoadBalancing"]["nbytes"]
    predicted = {name: found[name]["predicted"] for name in strategies.BUILDERS}
    # Auto decides on each variable by itself, and balances them. One owner of all saves
    # a message.
    assert predicted.pop("PS") <= predicted[strategies.AUTO]
    assert predicted[strategies.AUTO] == pytest.approx(min(predicted.values()))


@pytest.mark.slow
def test_all_programs_run_one_after_the_other(tmp_path: pathlib.Path) -> None:
    words = ["--quick", "--only=allreduce", f"--results_dir={tmp_path}"]
    result = forks.run(["-m", "benchmarks", *words], timeout=900)
    assert result.returncode == 0, result.stderr
    assert "allreduce took" in result.stderr and "report took" in result.stderr
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"RESULTS.md", "allreduce.json", "plots"}


@pytest.mark.parametrize(
    ("program", "words", "said"),
    [
        ("allreduce", "--only=1mb", "unknown: 1mb; have 1KiB, "),
        ("allreduce", "--only=", "unknown: nothing; have 1KiB, "),
        ("anywhere", "--only=allreduce", "unknown: allreduce; have "),
        ("at_work", "--only=1mb", "unknown: 1mb; have 1MiB, 64MiB"),
        ("build", "--only=large", "unknown: large; have deep, small"),
        ("build", "--build_counts=two", "--build_counts=two: give numbers from 1"),
        ("build", "--build_counts=1,0", "--build_counts=1,0: give numbers from 1"),
        ("embedding", "--onednn=x", "unknown: x; have on, off"),
        ("fit", "--only=gan", "unknown: gan; have "),
        ("hosts", "--links=1mbit", "unknown: 1mbit; have 1gbit, loopback"),
        ("hosts", "--only=2GiB", "unknown: 2GiB; have small, large, 4KiB, "),
        (
            "hosts",
            "--links=loopback --only=4KiB --torch=none/python",
            "--torch=none/python does not exist; `make bench-hosts` makes it",
        ),
        ("normalization", "--only=7", "unknown: 7; have 128, 32"),
        ("peers.__main__", "--only=jax", "unknown: jax; have torch, JAX"),
        ("profile", "--only=gan", "unknown: gan; have "),
        ("report", "--results_dir=nowhere", "nowhere holds no results; run python"),
        ("scaling", "--replica_counts=1,x", "--replica_counts=1,x: give numbers"),
        ("steps", "--only=smal", "unknown: smal; have small, large, deep, resnet20, "),
        ("steps", "small", "unknown: small; pass what you want as flags"),
        ("strategies", "--only=none", "unknown: none; have "),
        ("xla", "--only=lstm", "unknown: lstm; have "),
    ],
)
def test_wrong_flags_are_one_line(program: str, words: str, said: str) -> None:
    module = importlib.import_module(f"benchmarks.{program}")
    with flagsaver.flagsaver(), pytest.raises(SystemExit) as ended:
        module.main(flags.FLAGS(["program", *words.split()]))
    assert str(ended.value).startswith(f"error: {said}")


def test_a_wrong_flag_ends_python_m_benchmarks_with_status_1() -> None:
    command = [sys.executable, "-m", "benchmarks", "--only=step"]  # no TensorFlow
    result = subprocess.run(command, cwd=cli.REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: unknown: step; have ")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('why')", "error: -m told failed with status 1"),
        ("import time; time.sleep(60)", "error: -m told took more than 1 s"),
    ],
)
def test_a_cell_that_fails_ends_the_program_with_what_it_said(
    code: str,
    said: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(cli, "REPOSITORY", tmp_path)
    (tmp_path / "told.py").write_text(code)
    with pytest.raises(SystemExit, match=said):
        cli.apart("told", timeout=1)
    assert ("why" in capfd.readouterr().err) == ("why" in code)
