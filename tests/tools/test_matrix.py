# SPDX-License-Identifier: Apache-2.0
"""Skipped runs count as not run, and a failure fails the whole."""

from __future__ import annotations

import subprocess

import pytest

from tools import matrix


@pytest.mark.parametrize("rc", [0, 1])
def test_a_pair_is_installed_once_and_tested(monkeypatch, tmp_path, rc: int) -> None:
    commands: list[list[str]] = []

    def ran(command, **options):
        commands.append(command)
        folder = tmp_path / ".venv-matrix" / "3.12-2.21"
        folder.mkdir(parents=True, exist_ok=True)
        status = rc if "pytest" in command else 0
        return subprocess.CompletedProcess(command, status, "== 7 ok ==\n")

    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "python", lambda version: "python")
    monkeypatch.setattr(matrix.subprocess, "run", ran)
    for _ in range(2):
        commands.clear()
        result = matrix.run("3.12", "2.21", ["tests/plan"])
        status = ("passed", "failed")[rc]
        assert result == matrix.Result("3.12-2.21", status, "7 ok")
    assert [command[2] for command in commands] == ["pytest"]


def test_what_is_not_there_is_named_and_not_run(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(matrix, "python", lambda version: None)
    result = matrix.run("3.12", "2.21", [])
    assert (result.status, result.why) == ("not run", "no Python 3.12 was found")
    result = matrix.run("3.13", "2.18", [])
    assert result.status == "not run" and "no wheels" in result.why


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [("passed, not run", 0), ("passed, failed", 1), ("not run, not run", 1)],
)
def test_it_passes_if_something_ran_and_nothing_failed(
    monkeypatch, capsys, statuses: str, expected: int
) -> None:
    remaining = iter(statuses.split(", "))
    monkeypatch.setattr(matrix, "PYTHONS", ("3.11",))
    monkeypatch.setattr(matrix, "TENSORFLOWS", ("2.18", "2.21"))
    monkeypatch.setattr(
        matrix, "run", lambda p, t, x: matrix.Result(f"{p}-{t}", next(remaining), "why")
    )
    assert matrix.main([]) == expected
    printed = capsys.readouterr().out
    assert all(status in printed for status in statuses.split(", "))


@pytest.mark.parametrize("argument", ["--only=2.7-1.15", "--all"])
def test_unknown_arguments_are_refused(argument: str, capsys) -> None:
    assert matrix.main([argument]) == 2
    assert capsys.readouterr().err.startswith("usage")
