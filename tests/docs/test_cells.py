# SPDX-License-Identifier: Apache-2.0
"""Pages are Markdown as GitHub shows it, and are read as notebooks."""

from __future__ import annotations

import pathlib
import re

from docs._ext import cells

_DOCS = pathlib.Path(cells.__file__).parents[1]
_FENCES = re.compile(r"^(```+)(?!`).*?^\1$", re.M | re.S)
_COMMENTS = re.compile(r"^<!-- .*?-->$", re.M | re.S)
_MARKUP = re.compile(r"\{\w+\}`|\{\{|^---$|^\(.*\)=$|^:::|:tags:", re.M)


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
    assert notebook.cells[1].metadata.get("tags", []) == []
    assert notebook.cells[3].metadata["tags"] == ["remove-input"]


def test_what_is_for_the_site_alone_is_a_comment_on_github() -> None:
    directive = "```{toctree}\n:hidden:\n\nguides/index\n```"
    (cell,) = cells.read(f"# A\n\n<!-- site\n{directive}\n-->\n").cells
    assert (cell.cell_type, cell.source) == ("markdown", f"# A\n\n{directive}")


def test_a_page_without_cells_starts_no_kernel() -> None:
    notebook = cells.read("# A\n\n```py\nx\n```\n")
    assert notebook.metadata["mystnb"] == {"execution_mode": "off"}


def test_pages_show_no_markup_of_the_site_on_github() -> None:
    for path in sorted(_DOCS.rglob("*.md")):
        text = _COMMENTS.sub("", path.read_text())
        assert not re.search(r"^```+\{", text, re.M), path.name
        assert not _MARKUP.search(_FENCES.sub("", text)), path.name


def test_every_guide_is_in_the_sidebar_and_in_the_list_of_guides() -> None:
    index = (_DOCS / "index.md").read_text()
    listed = (_DOCS / "guides" / "index.md").read_text()
    for path in sorted((_DOCS / "guides").glob("*.md")):
        assert f"\nguides/{path.stem}\n" in index, path.name
        assert path.stem == "index" or f"]({path.name})" in listed, path.name
