# SPDX-License-Identifier: Apache-2.0
"""The site's extensions: cells of pages, dead links, what is searched."""

from __future__ import annotations

import pathlib

import pytest

from docs._ext import cells, links


def test_fences_and_comments_are_cells() -> None:
    page = "# A\n\n```python\nx = 1\n```\n\n```py\ny\n```\n\n<!-- cell\nx + 1\n-->\n"
    notebook = cells.read(page)
    kinds = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert kinds == [
        ("markdown", "# A"),
        ("code", "x = 1"),
        ("markdown", "```py\ny\n```"),
        ("code", "x + 1"),
    ]
    tags = [cell.metadata.get("tags", []) for cell in notebook.cells]
    assert tags[1] == [] and tags[3] == ["remove-input"]


def test_a_page_without_cells_starts_no_kernel_and_has_what_is_for_the_site() -> None:
    directive = "```{toctree}\n:hidden:\n\nguides/index\n```"
    notebook = cells.read(f"# A\n\n<!-- site\n{directive}\n-->\n")
    (cell,) = notebook.cells
    assert (cell.cell_type, cell.source) == ("markdown", f"# A\n\n{directive}")
    assert notebook.metadata["mystnb"] == {"execution_mode": "off"}


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('<a href="pages/one.html">', ""),
        ('<a href="pages/one.html#top">', ""),
        ('<a href="#here">', ""),
        ('<img src="picture.svg">', ""),
        ('<a href="https://example.org/paper">', ""),
        ('<img src="data:image/png;base64,AA==">', ""),
        ('<a href="pages/two.html">', "<a> pages/two.html: does not exist"),
        ('<a href="pages/one.html#end">', "no such place in the page"),
        ('<a href="#end">', "<a> #end: no such place in the page"),
        ('<img src="missing.svg">', "<img> missing.svg: does not exist"),
        ('<script src="https://cdn.example.org/x.js">', "fetched from another host"),
        ('<link rel="stylesheet" href="//fonts.example.org/x">', "another host"),
    ],
)
def test_what_leads_nowhere_is_named(
    tmp_path: pathlib.Path, index: str, said: str
) -> None:
    head = '<h1 id="top">Title</h1>'
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "one.html").write_text(f'{head}<a href="../index.html#here">')
    (tmp_path / "picture.svg").write_text("<svg/>")
    (tmp_path / "index.html").write_text(f'<p id="here">{index}')
    found = links.problems(tmp_path)
    assert len(found) == bool(said)
    assert all(text.startswith("index.html: ") and said in text for text in found)


def test_pictures_are_not_searched_and_pages_are_described_by_their_beginning() -> None:
    pytest.importorskip("docutils", reason="is installed for the documentation only")
    from docutils import frontend, nodes, utils

    from docs._ext import search

    texts = ["<b>bold</b>", "<p><svg><text>a1</text></svg></p>"]
    page = utils.new_document("page", frontend.get_default_settings())
    page.extend(nodes.raw("", text, format="html") for text in texts)
    search.leave_pictures_out(page)
    assert [part["classes"] for part in page.children] == [[], ["no-search"]]
    assert search.description(page) == ""
    page.extend([nodes.title("", "Sums"), nodes.paragraph("", "All about\nsums.")])
    page.append(nodes.paragraph("", "x"))
    assert search.description(page) == "All about sums."
