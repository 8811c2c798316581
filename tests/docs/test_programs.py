# SPDX-License-Identifier: Apache-2.0
"""Every program of examples/ has a page, with its command and its flags."""

from __future__ import annotations

import os
import pathlib
import re
import sys

import pytest
from absl import flags as absl_flags

from docs._ext import flags, programs

_ROOT = programs.EXAMPLES.parent
_PAGES = _ROOT / "docs" / "programs"
_LIST = re.compile(r"^EXAMPLES := ((?:.*\\\n)*.*)$", re.MULTILINE)
_TARGETS = {
    name.replace("-", "_"): f"make {name}"
    for name in _LIST.findall((_ROOT / "Makefile").read_text())[0].split()
    if name != "\\"
}
# The actors are started by the learner, and on its page.
_NAMES = [name for name in programs.examples() if name != "actors"]


def _page(name: str) -> str:
    return (_PAGES / f"{name}.md").read_text()


def test_the_makefile_is_read() -> None:
    assert _TARGETS["tensor_parallel"] == "make tensor-parallel"
    assert _TARGETS.keys() < set(_NAMES)


@pytest.mark.parametrize("name", _NAMES)
def test_every_program_has_a_page(name: str) -> None:
    page, index = _page(name), _page("index")
    assert f"examples/{name}.py" in page
    assert f"\n```{{flags}} {name}\n" in page
    assert f"]({name}.md) | `" in index
    if name in _TARGETS:
        assert f"\n{_TARGETS[name]}\n" in page
        assert f"| `{_TARGETS[name]}` |" in index


_SHOWN = re.compile(r"^<!-- of (\S+) -->\n\n```\w+\n(.*?)\n```$", re.M | re.S)


@pytest.mark.parametrize("name", [*_NAMES, "index", "minimal"])
def test_what_a_page_shows_of_a_program_is_in_the_program(name: str) -> None:
    found = _SHOWN.findall(_page(name))
    assert len(found) == _page(name).count("<!-- of ")
    for path, code in found:
        assert _characters(code) in _characters((_ROOT / path).read_text()), code


@pytest.mark.parametrize("path", sorted((programs.EXAMPLES / "minimal").glob("*.py")))
def test_a_short_program_is_short(path: pathlib.Path) -> None:
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert sum(line != "" and not line.startswith("#") for line in lines) <= 60


def _characters(code: str) -> str:
    """Returns code without white space, which depends on how far it is indented."""
    return "".join(code.split())


def test_every_page_is_about_a_program() -> None:
    pages = {path.stem for path in _PAGES.glob("*.md")}
    assert pages == {*_NAMES, "index", "minimal"}


@pytest.mark.parametrize("name", _NAMES)
def test_the_flags_of_a_program_have_help_and_stay_its_own(name: str) -> None:
    before = set(absl_flags.FLAGS), dict(os.environ), list(sys.path)
    program = programs.read_example(name)
    assert program.flags
    assert all(flag.help and "%(" not in flag.help for flag in program.flags)
    assert before == (set(absl_flags.FLAGS), dict(os.environ), list(sys.path))
    assert name not in sys.modules


def test_flags_that_examples_share_are_listed() -> None:
    lines = flags.text(programs.read_example("tensor_parallel")).splitlines()
    for line in (
        "`--devices A,B,...`",
        ": One device per replica. Default: `CPU:0,CPU:1`.",
        "`--sequence_parallel`",
        ": Divide tokens between layers, too. Default: `True`.",
    ):
        assert line in lines


def test_flags_of_argparse_are_listed() -> None:
    lines = flags.text(programs.read_example("graph_mode")).splitlines()
    assert "`--epochs N`" in lines
    assert ": Passes over the training images (default: 10)." in lines


def test_a_program_without_flags_is_refused() -> None:
    with pytest.raises(ValueError, match="actors has neither flags of absl nor a par"):
        programs.read_example("actors")
