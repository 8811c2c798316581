# SPDX-License-Identifier: Apache-2.0
"""Rejects a site with a link, picture or script that leads nowhere, or off the site.

Sphinx warns of dead references between pages; this checks the output: the `href` and
`src` attributes of every page, and the anchors that they name. Pages load nothing from
other hosts.
"""

from __future__ import annotations

import html.parser
import pathlib
import urllib.parse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that tests of the rest need no Sphinx
    from sphinx.application import Sphinx

# What a browser fetches by itself; the `href` of an <a> may lead to other hosts.
_FETCHED = {"script", "img", "source", "iframe", "video", "audio", "embed", "object"}


class _Page(html.parser.HTMLParser):
    """The links of a page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []  # (tag, target)
        self.places: set[str] = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        for name in ("id", "name"):
            self.places.add(attributes.get(name) or "")
        relation = attributes.get("rel") or ""
        for name in ("href", "src", "data"):
            target = attributes.get(name)
            if target is not None and "canonical" not in relation:
                self.links.append((tag, target))


def problems(site: pathlib.Path) -> list[str]:
    """Returns the problems with the links of a built site.

    Args:
        site: The folder of its pages.
    """
    pages = {path.resolve(): _Page(path.read_text()) for path in site.rglob("*.html")}
    lines = []
    for path, page in pages.items():
        for tag, target in page.links:
            problem = _why_not(path, tag, target, pages)
            if problem:
                name = path.relative_to(site.resolve())
                lines.append(f"{name}: <{tag}> {target}: {problem}")
    return sorted(set(lines))


def _why_not(
    path: pathlib.Path, tag: str, target: str, pages: dict[pathlib.Path, _Page]
) -> str:
    """Returns the problem with a link, or ""."""
    parts = urllib.parse.urlsplit(target)
    if parts.scheme == "data":
        return ""
    if parts.scheme or parts.netloc:
        fetched = tag in _FETCHED or tag == "link"
        return "is fetched from another host" if fetched else ""
    to = path
    if parts.path:
        to = (path.parent / urllib.parse.unquote(parts.path)).resolve()
        if not to.exists():
            return "does not exist"
    place = urllib.parse.unquote(parts.fragment)
    if to in pages and place not in pages[to].places and path.stem != "search":
        return "no such place in the page"
    return ""


def _check(app: Sphinx, error: Exception | None) -> None:
    from sphinx.util import logging

    if error is None and app.builder.name == "html":
        for problem in problems(pathlib.Path(app.outdir)):
            logging.getLogger(__name__).warning("dead link: %s", problem, type="links")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("build-finished", _check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
