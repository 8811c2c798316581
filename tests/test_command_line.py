# SPDX-License-Identifier: Apache-2.0
"""Programs of the library report a bad flag in one line, with status 2."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import pytest
from absl import flags

import replicator
from replicator import command_line
from tests import mains


def test_a_bad_flag_is_one_line_and_status_2(capsys: Any) -> None:
    assert mains.status(lambda argv: 0, "--no_such_flag=1") == 2
    caught = capsys.readouterr()
    assert caught.out == "" and caught.err.count("\n") == 1
    assert "no_such_flag" in caught.err


def test_no_program_does_it_by_itself() -> None:
    room = pathlib.Path(replicator.__file__).parent
    paths = [path for path in room.rglob("*.py") if "flags.FLAGS(" in path.read_text()]
    assert [path.name for path in paths] == ["command_line.py"]


def test_an_interrupt_is_one_word_and_the_shells_status(capsys: Any) -> None:
    @command_line.interruptible
    def main(argv: Sequence[str]) -> int:
        raise KeyboardInterrupt

    assert mains.status(main) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("program", ["", "calibrate.", "plan.", "profile."])
def test_all_programs_end_so(program: str) -> None:
    # Two programs with flags of the same name cannot be imported into one process.
    spec = importlib.util.find_spec(f"replicator.{program}__main__")
    source = pathlib.Path(spec.origin).read_text()
    assert "@command_line.interruptible\ndef main(" in source


# --- Output files ---------------------------------------------------------------------

_OWN = flags.FlagValues()
_ONE = flags.DEFINE_string("one", None, "A file.", flag_values=_OWN)
_TWO = flags.DEFINE_string("two", None, "Another.", flag_values=_OWN)


def _check(*arguments: str) -> None:
    command_line.parse(["program", *arguments], _OWN)
    command_line.check_outputs(_ONE, _TWO)


def test_files_that_can_be_written_stay_as_they_are(
    tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").write_text("text")
    os.mkfifo("pipe")
    for arguments in ((), ("--one=old", "--two=new"), ("--one=pipe",)):
        _check(*arguments)
    assert sorted(os.listdir()) == ["old", "pipe"]
    assert (tmp_path / "old").read_text() == "text"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--two=no/folder",), "--two: FileNotFoundError"),
        (("--one=",), "--one: FileNotFoundError"),
        (("--one=.",), "--one: IsADirectoryError"),
        (("--one=old/file",), "--one: NotADirectoryError"),
        (("--one=" + "a" * 5000,), "--one: OSError"),
        (("--one=a\0b",), "--one: ValueError"),
        (("--one=new", "--two=./new"), "--one and --two name the same file"),
    ],
)
def test_files_that_cannot_be_written_are_refused_before_all_else(
    arguments: tuple[str, ...], message: str, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").write_text("text")
    with pytest.raises(command_line.BadInput, match=message):
        _check(*arguments)
    assert os.listdir() == ["old"]


def test_a_text_of_several_lines_becomes_one(capsys: Any) -> None:
    assert command_line.fail(ValueError("one\n  two")) == 2
    assert command_line.fail("a" * 5000) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "one two" and len(second) < 1100
