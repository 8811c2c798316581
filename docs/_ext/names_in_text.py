# SPDX-License-Identifier: Apache-2.0
"""Links public names where texts mention them, and rejects unknown ones.

In Markdown, `repl.all_reduce`, `replicator.PerReplica` and `Replicator.run` in code
font become links automatically. Text that begins with "repl." or "replicator." and does
not exist causes a warning, so that no guide keeps the name of a renamed method. In
docstrings, a word in single backticks becomes a link if it is a public name.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

from docs._ext import names

_LOG = logging.getLogger(__name__)
_CALL = re.compile(r"([A-Za-z_][\w.]*)(\(.*\))?\Z", re.DOTALL)
# The prefixes that mark a text in code font as a name of this library.
_OURS = ("repl.", "replicator.", "Replicator.")


@functools.cache
def _known() -> dict[str, str]:
    return names.by_short_name()


def link(text: str, here: str = "") -> pending_xref | None:
    """Returns a link for a text in code font, if it is a public name.

    Args:
        text: E.g. "repl.all_reduce(x)".
        here: The document.
    """
    match = _CALL.match(text)
    full = _known().get(match[1]) if match else None
    if full is None:
        return None
    code = nodes.literal(text, text, classes=["py"])
    return pending_xref(
        *("", code),
        refdomain="py",
        reftype="obj",
        reftarget=full,
        refexplicit=True,
        refwarn=True,
        refdoc=here,
    )


def _role(
    name: str,
    rawtext: str,
    text: str,
    lineno: int,
    inliner: Inliner,
    options: Any = None,
    content: Any = (),
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """The role of single backticks in docstrings."""
    document = inliner.document.settings.env.docname
    return [link(text, document) or nodes.literal(rawtext, text)], []


class Names(SphinxTransform):
    """Links the public names in code font in Markdown."""

    default_priority = 400

    def apply(self, **kwargs: Any) -> None:
        """Processes a page."""
        if self.env.docname.startswith("reference/api/"):
            return
        for literal in list(self.document.findall(nodes.literal)):
            text = literal.astext()
            if isinstance(literal.parent, pending_xref | nodes.reference | nodes.title):
                continue
            if not text.startswith((*_OURS, *_bare())):
                continue
            reference = link(text, self.env.docname)
            if reference is not None:
                literal.replace_self(reference)
            elif text.startswith(_OURS) and not _exists(text):
                _LOG.warning("no public name: %s", text, location=literal, type="names")


@functools.cache
def _bare() -> tuple[str, ...]:
    """Class names, which texts mention without a module."""
    return tuple(name for name in _known() if name[:1].isupper())


def _exists(text: str) -> bool:
    """Whether a dotted name is a module, or an attribute of a module or class."""
    match = _CALL.match(text)
    if match is None:  # code, not just a name
        return True
    parts = match[1].split(".")
    if parts[0] in ("repl", "Replicator"):
        return _known().get(".".join(parts[:2])) is not None
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        if prefix in _known():
            return True
        try:
            if importlib.util.find_spec(prefix) is not None:
                return end == len(parts)
        except (ImportError, ValueError):
            continue
    return False


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_role("api", _role)
    app.add_transform(Names)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
