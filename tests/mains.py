# SPDX-License-Identifier: Apache-2.0
"""What tests of the library's programs share: they are run in the tests' process."""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl.testing import flagsaver

from replicator import command_line

_numbers = itertools.count()  # Python imports no module anew under the same name


def status(main: Callable[[Sequence[str]], int], *arguments: str) -> Any:
    """Runs a program as absl would; returns its exit status."""
    own = getattr(sys.modules[main.__module__], "OWN", None)
    with flagsaver.flagsaver():
        try:
            return main(command_line.parse(["program", *arguments], own))
        except SystemExit as end:
            return end.code


def module_of(text: str, folder: pathlib.Path, monkeypatch: Any) -> str:
    """Makes a module in what becomes the working directory; returns its name."""
    name = f"made_{next(_numbers)}"
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return name


def line_of(fragment: str, text: str) -> int:
    """Returns the number of the only line of a module that holds a fragment."""
    (number,) = [n for n, line in enumerate(text.splitlines(), 1) if fragment in line]
    return number
