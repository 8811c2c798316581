# SPDX-License-Identifier: Apache-2.0
"""Runs the library's command-line programs in the process of the tests."""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl.testing import flagsaver

from replicator import command_line

_numbers = itertools.count()  # Python does not reimport a module of the same name


def status(main: Callable[[Sequence[str]], int], *arguments: str) -> Any:
    """Runs a program as absl would; returns its exit status."""
    flag_values = getattr(sys.modules[main.__module__], "PROGRAM_FLAGS", None)
    with flagsaver.flagsaver():
        try:
            return main(command_line.parse(["program", *arguments], flag_values))
        except SystemExit as end:
            return end.code


def module_of(text: str, folder: pathlib.Path, monkeypatch: Any) -> str:
    """Makes a module in a folder and changes into that; returns the module's name."""
    name = f"m_{next(_numbers):03}"  # as wide in each table, whatever ran before
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return name


def line_of(fragment: str, text: str) -> int:
    """Returns the number of a module's only line that contains a fragment."""
    (number,) = [n for n, line in enumerate(text.splitlines(), 1) if fragment in line]
    return number
