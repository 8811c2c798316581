# SPDX-License-Identifier: Apache-2.0
"""What a search finds, and how pages describe themselves to search engines.

The texts in pictures ("a1", "b2", names of ops) are not what anyone looks for: they are
left out of the index. Each page is described by its first paragraph.
"""

from __future__ import annotations

import html
import textwrap
from typing import TYPE_CHECKING, Any

from docutils import nodes

if TYPE_CHECKING:  # so that tests need no Sphinx
    from sphinx.application import Sphinx

_LONGEST = 160  # characters that search engines show


def leave_pictures_out(page: nodes.document) -> None:
    """Marks the pictures of a page for Sphinx's index."""
    for raw in page.findall(nodes.raw):
        if "<svg" in raw.astext():
            raw["classes"].append("no-search")


def description(page: nodes.document) -> str:
    """Returns the beginning of a page's text in one short line, or ""."""
    for paragraph in page.findall(nodes.paragraph):
        text = " ".join(paragraph.astext().split())
        return textwrap.shorten(text, _LONGEST, placeholder=" ...")
    return ""


def _read(app: Sphinx, page: nodes.document) -> None:
    leave_pictures_out(page)


def _describe(
    app: Sphinx,
    name: str,
    template: str,
    context: dict[str, Any],
    page: nodes.document | None,
) -> None:
    text = "" if page is None else description(page)
    if text:
        tag = f'<meta name="description" content="{html.escape(text)}">'
        context["metatags"] = f"{context.get('metatags', '')}\n{tag}"


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("doctree-read", _read)
    app.connect("html-page-context", _describe)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
