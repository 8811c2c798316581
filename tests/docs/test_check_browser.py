# SPDX-License-Identifier: Apache-2.0
"""The problems that a browser finds on a site, on small sites with one fault each."""

from __future__ import annotations

import pathlib

import pytest

pytest.importorskip("tornado", reason="is installed for the documentation only")
from docs import check_browser

pytestmark = pytest.mark.slow  # starts a browser

_PAGE = "<!doctype html><meta name=viewport content='width=device-width'><p>Words. "
_PICTURE = "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'></svg>"
_DRAWN = (
    "<svg role=img width=9 height=9><title>t</title><rect width=9 height=9 /></svg>"
)
_ICON = "<link rel=icon href=picture.svg>"


@pytest.fixture(scope="module", autouse=True)
def _browser() -> None:
    try:
        check_browser.browser()
    except check_browser.NoBrowser as error:
        pytest.skip(str(error))


def _problems(folder: pathlib.Path, body: str, search: str = "") -> list[str]:
    (folder / "picture.svg").write_text(_PICTURE)
    (folder / "page.html").write_text(f"{_PAGE}{_ICON}{body}")
    return check_browser.problems(folder, ["page.html"], search)


def test_a_sound_page_has_no_problem(tmp_path: pathlib.Path) -> None:
    symbol = "<svg width=0 height=0></svg>"  # of the theme, not marked as a picture
    assert _problems(tmp_path, f"<img src=picture.svg>{_DRAWN}{symbol}") == []
    assert check_browser.problems(tmp_path, None, "", tmp_path) == []
    assert (tmp_path / "page-phone.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("<img src=missing.svg>", "missing.svg does not load"),
        ("<script>throw new Error('no idea')</script>", "a script fails: Error: no"),
        ("<script>console.error('oh no')</script>", "error in the console: oh no"),
        ("<img src='http://127.0.0.2:9/x.png'>", "asks another host for http://127"),
        (
            f"{_DRAWN}<svg role=img aria-label='a, b' width=9 height=9></svg>",
            "the inline picture 2 of 2 (a, b) shows nothing",
        ),
        (
            _DRAWN.replace("<svg", "<svg hidden style='display: none'"),
            "1 of 1 (no label)",
        ),
        (
            _DRAWN.replace("img width=9", "img width=0"),
            "1 of 1 (no label) shows nothing",
        ),
    ],
)
def test_a_fault_is_told_at_both_widths(
    tmp_path: pathlib.Path, body: str, said: str
) -> None:
    actual = _problems(tmp_path, body)
    for place in ("page.html on a desk: ", "page.html on a phone: "):
        assert any(text.startswith(place) and said in text for text in actual)


def test_a_page_that_is_too_wide_for_a_phone(tmp_path: pathlib.Path) -> None:
    (problem,) = _problems(tmp_path, "<div style='width: 700px'>wide</div>")
    assert problem.startswith("page.html on a phone: is 7")


@pytest.mark.parametrize(
    ("block", "wide"),
    [
        ("<table><td style='min-width: 2000px'>a table</table>", True),
        ("<table><td>a table</table>", False),
        ("<pre style='width: 2000px'>a table</pre>", True),
        (f"<pre style='overflow: auto'>{'a table' * 300}</pre>", False),
    ],
)
def test_what_is_wider_than_its_column(
    tmp_path: pathlib.Path, block: str, wide: bool
) -> None:
    body = f"<article><div style='overflow: auto'>{block}</div></article>"
    actual = _problems(tmp_path, body)
    assert [' "a table" by ' in text for text in actual] == [True, True] * wide


def test_a_search_that_finds_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_browser, "_PATIENCE", 1.0)
    (tmp_path / "search.html").write_text(f"{_PAGE}<ul class=search><li><a>sum</a>")
    assert _problems(tmp_path, "", "sum") == []
    (problem,) = _problems(tmp_path, "", "product")
    assert problem == "the search does not find product: ['sum']"
