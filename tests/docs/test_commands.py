# SPDX-License-Identifier: Apache-2.0
"""Commands in pages show what they print, and fail the build if they fail."""

from __future__ import annotations

import pathlib

import pytest

from docs.helpers import commands


def test_a_command_is_shown_with_its_output() -> None:
    command = "python -c 'print(\"a  <b>\")'"
    html = commands.run(command).data
    assert "$ python -c" in html
    assert html.endswith("a  &lt;b&gt;</pre>")


def test_a_command_prints_no_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    html = commands.run("python -c 'import rich; rich.print(\"[red]a[/red] b\")'").data
    assert html.endswith("\na b</pre>")


def test_a_command_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)exit.* ended with 3: oh no"):
        commands.run(
            """python -c 'import sys; print("oh no", file=sys.stderr); exit(3)'"""
        )


def test_examples_are_those_of_this_repository(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "load_examples" in commands.run("python -m tokenize examples/digits.py").data
