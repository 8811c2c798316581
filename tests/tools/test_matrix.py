# SPDX-License-Identifier: Apache-2.0
"""Skipped runs count as not run, and a failure fails the whole."""

from __future__ import annotations

import subprocess

import pytest

from tools import matrix


def _pair(monkeypatch, tmp_path, *, there: bool = True, rc: int = 0):
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "python", lambda version: "python" if there else None)
    commands: list[list[str]] = []

    def ran(command, **options):
        commands.append(command)
        folder = tmp_path / ".venv-matrix" / "3.12-2.21"
        folder.mkdir(parents=True, exist_ok=True)
        tests = "pytest" in command
        return subprocess.CompletedProcess(command, rc if tests else 0, "== 7 ok ==\n")

    monkeypatch.setattr(matrix.subprocess, "run", ran)
    return matrix.run("3.12", "2.21", ["tests/plan"]), commands


@pytest.mark.parametrize(("rc", "status"), [(0, "passed"), (1, "failed")])
def test_a_pair_is_installed_once_and_tested(monkeypatch, tmp_path, rc, status) -> None:
    result, commands = _pair(monkeypatch, tmp_path, rc=rc)
    assert result == matrix.Result("3.12-2.21", status, "7 ok")
    assert any("tensorflow == 2.21.*" in c for c in commands)
    _, again = _pair(monkeypatch, tmp_path, rc=rc)
    assert [c[2] for c in again] == ["pytest"]


def test_a_python_that_is_not_there_is_named(monkeypatch, tmp_path) -> None:
    result, commands = _pair(monkeypatch, tmp_path, there=False)
    assert (result.status, result.why) == ("not run", "no Python 3.12 was found")
    assert not commands


def test_pairs_without_wheels_are_named() -> None:
    result = matrix.run("3.13", "2.18", [])
    assert result.status == "not run" and "no wheels" in result.why


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("passed", "not run"), 0),
        (("passed", "failed"), 1),
        (("not run", "not run"), 1),
    ],
)
def test_it_passes_if_something_ran_and_nothing_failed(
    monkeypatch, capsys, statuses, expected
) -> None:
    remaining = iter(statuses)
    monkeypatch.setattr(matrix, "PYTHONS", ("3.11",))
    monkeypatch.setattr(
        matrix, "run", lambda p, t, x: matrix.Result(f"{p}-{t}", next(remaining), "why")
    )
    assert matrix.main([]) == expected
    assert all(status in capsys.readouterr().out for status in [*statuses][:1])


@pytest.mark.parametrize("argument", ["--only=2.7-1.15", "--all"])
def test_unknown_arguments_are_refused(argument, capsys) -> None:
    assert matrix.main([argument]) == 2
    assert capsys.readouterr().err.startswith("usage")
