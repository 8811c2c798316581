# SPDX-License-Identifier: Apache-2.0
"""Pictures are not searched for words, and pages are described by their beginning."""

from __future__ import annotations

import pytest

pytest.importorskip("docutils", reason="is installed for the documentation only")
from docutils import frontend, nodes, utils

from docs._ext import search


def _page(*parts: nodes.Node) -> nodes.document:
    page = utils.new_document("page", frontend.get_default_settings())
    page.extend(parts)
    return page


def test_pictures_are_left_out_of_the_index() -> None:
    texts = ["<b>bold</b>", "<p><svg><text>a1</text></svg></p>"]
    page = _page(*(nodes.raw("", text, format="html") for text in texts))
    search.leave_pictures_out(page)
    assert [part["classes"] for part in page.children] == [[], ["no-search"]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("All about\nsums.", "All about sums."),
        ("word " * 90, " ".join(["word"] * 31) + " ..."),
        (None, ""),
    ],
)
def test_the_first_paragraph_describes_a_page(text: str | None, said: str) -> None:
    parts = (
        [] if text is None else [nodes.paragraph("", text), nodes.paragraph("", "x")]
    )
    assert search.description(_page(nodes.title("", "Sums"), *parts)) == said
    assert len(said) <= 160
