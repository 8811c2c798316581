# SPDX-License-Identifier: Apache-2.0
"""The messages that the page of errors explains are messages of the library."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

_ROOT = pathlib.Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "reference" / "errors.md"
_MESSAGE = re.compile(r"^\| \*([^*]+)\*", re.MULTILINE)
# What differs from one message to the next.
_VALUE = re.compile(r"\.\.\.|\d+|'[^']*'|\w+(?==)|\w+\[.*?\]")


def _texts() -> Iterator[str]:
    """Yields the texts in the library's code; f-strings have no values."""
    for path in (_ROOT / "replicator").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                yield "\0".join(p for p in parts if isinstance(p, str))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _missing(page: str) -> list[str]:
    """Returns the messages of a page of which the library has no such part."""
    texts = "\n".join(_texts())
    return [
        message
        for message in _MESSAGE.findall(page)
        if any(part.strip(" ,'=") not in texts for part in _VALUE.split(message))
    ]


def test_every_message_of_the_page_is_in_the_library() -> None:
    page = _PAGE.read_text()
    assert len(_MESSAGE.findall(page)) > 50
    assert _missing(f"{page}\n| *was never said of 3 replicas* |") == [
        "was never said of 3 replicas"
    ]
