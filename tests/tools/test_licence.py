# SPDX-License-Identifier: Apache-2.0
"""The licence header: on all files once it is on one, and added in the right place."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tools import licence


def test_all_files_have_the_header_or_none_has() -> None:
    # None has it until `python tools/licence.py --write` has run once; then each needs
    # it.
    identifier = licence.HEADER.rpartition(" ")[2]  # this line is not a header
    assert identifier == "Apache-2.0"
    actual = {
        p: licence.has_header(p.read_text()) for p in licence.sources(licence._ROOT)
    }
    full = {p: has for p, has in actual.items() if p.read_text().strip()}
    without = [str(p) for p, has in full.items() if not has]
    assert not without or len(without) == len(full), without


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"""Doc."""\n', f'{licence.HEADER}\n"""Doc."""\n'),
        ("#!/usr/bin/python\nx = 1\n", f"#!/usr/bin/python\n{licence.HEADER}\nx = 1\n"),
        ("", ""),
    ],
)
def test_the_line_comes_first_and_once(text: str, expected: str) -> None:
    assert licence.with_header(text) == expected
    assert licence.with_header(expected) == expected


def test_a_file_keeps_its_docstring() -> None:
    code = compile(licence.with_header('"""Doc."""\n'), "file", "exec")
    names: dict[str, str] = {}
    exec(code, names)
    assert names["__doc__"] == "Doc."


def test_unknown_arguments_are_refused() -> None:
    result = subprocess.run(
        [sys.executable, licence.__file__, "--all"], capture_output=True, text=True
    )
    assert result.returncode == 2 and result.stderr.startswith("usage: ")
