# SPDX-License-Identifier: Apache-2.0
"""Dead links of a site are found, and live ones are not reported."""

from __future__ import annotations

import pathlib

import pytest

from docs._ext import links

_HEAD = '<h1 id="top">Title</h1>'


def _site(folder: pathlib.Path, index: str) -> list[str]:
    (folder / "pages").mkdir()
    (folder / "pages" / "one.html").write_text(_HEAD + '<a href="../index.html#here">')
    (folder / "picture.svg").write_text("<svg/>")
    (folder / "index.html").write_text('<p id="here">' + index)
    return links.problems(folder)


@pytest.mark.parametrize(
    "index",
    [
        '<a href="pages/one.html">',
        '<a href="pages/one.html#top">',
        '<a href="#here">',
        '<img src="picture.svg">',
        '<a href="https://example.org/paper">',
        '<img src="data:image/png;base64,AA==">',
    ],
)
def test_what_is_there_is_no_problem(tmp_path: pathlib.Path, index: str) -> None:
    assert _site(tmp_path, index) == []


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('<a href="pages/two.html">', "<a> pages/two.html: does not exist"),
        ('<a href="pages/one.html#end">', "no such place in the page"),
        ('<a href="#end">', "<a> #end: no such place in the page"),
        ('<img src="missing.svg">', "<img> missing.svg: does not exist"),
        ('<script src="https://cdn.example.org/x.js">', "fetched from another host"),
        ('<link rel="stylesheet" href="//fonts.example.org/x">', "another host"),
    ],
)
def test_what_is_not_there_is_named(
    tmp_path: pathlib.Path, index: str, said: str
) -> None:
    (problem,) = _site(tmp_path, index)
    assert problem.startswith("index.html: ")
    assert said in problem
