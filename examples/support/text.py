# SPDX-License-Identifier: Apache-2.0
"""The source text of Python's own standard library."""

from __future__ import annotations

import pathlib
import sysconfig

from support import program


def library_files() -> list[pathlib.Path]:
    """Returns the single-file modules of the standard library, by name.

    Raises:
        UsageError: This Python was installed without its source.
    """
    folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder.glob("*.py"))
    if not paths:
        raise program.UsageError(f"{folder} holds no text of the standard library")
    return paths


def library_text(path: pathlib.Path) -> str:
    """Returns the text of one of them."""
    return path.read_text("utf-8", "replace")
