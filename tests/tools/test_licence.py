# SPDX-License-Identifier: Apache-2.0
"""The licence header: on all files of code, and added in the right place."""

from __future__ import annotations

import pathlib

import pytest

from tools import licence


def test_all_files_have_the_header() -> None:
    paths = licence.sources(licence._ROOT)
    assert [p for p in paths if not licence.has_header(p, p.read_text())] == []
    names = {p.relative_to(licence._ROOT).as_posix() for p in paths}
    assert {"Makefile", ".ci/run", "replicator/strategy/strategy.proto"} < names
    assert "replicator/strategy/strategy_pb2.py" not in names  # is generated


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.py", '"""Doc."""\n', '# {}\n"""Doc."""\n'),
        ("a.py", "#!/usr/bin/python\nx = 1\n", "#!/usr/bin/python\n# {}\nx = 1\n"),
        ("a.py", "", ""),
        ("a.proto", "// Doc.\n", "// {}\n// Doc.\n"),
        ("a.css", "p {}\n", "/* {} */\np {}\n"),
        ("Makefile", "all:\n", "# {}\nall:\n"),
    ],
)
def test_the_line_comes_first_and_once(name: str, text: str, expected: str) -> None:
    path = pathlib.Path(name)
    expected = expected.replace("{}", licence.HEADER, 1)
    assert licence.with_header(path, text) == expected
    assert licence.with_header(path, expected) == expected


def test_unknown_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert licence.main(["--all"]) == 2
    assert capsys.readouterr().err.startswith("usage: ")
