# SPDX-License-Identifier: Apache-2.0
"""Every primitive has a picture in the guide to communication, or says whose."""

from __future__ import annotations

import pathlib
import re

from docs._ext import names

_PAGE = pathlib.Path(names.__file__).parents[1] / "guides" / "communication.md"
_TOPICS = ("Collectives", "Messages", "Python objects", "Methods of TF-Replicator")
_CELL = re.compile(r"^```python$(.*?)^```$", re.M | re.S)
_CALL = re.compile(r"\brepl\.(\w+)")


def _drawn(page: str) -> set[str]:
    """Returns the methods called in cells that draw a picture."""
    cells = [cell for cell in _CELL.findall(page) if "picture(" in cell]
    return {name for cell in cells for name in _CALL.findall(cell)}


def _borrowed(page: str) -> dict[str, str]:
    """Returns the methods that have another's picture, and the method whose it is."""
    table = page.partition("## Calls with the picture of another\n")[2]
    rows = [line.split("|") for line in table.partition("\n## ")[0].splitlines()]
    pairs = [
        (_CALL.findall(row[1]), _CALL.findall(row[2])) for row in rows[3:] if row[1:]
    ]
    return {name: whose for calls, (whose,) in pairs for name in calls}


def _without(page: str) -> set[str]:
    listed = {name for topic in _TOPICS for name in names.METHODS[topic]}
    return listed - _drawn(page) - set(_borrowed(page))


def test_every_primitive_has_a_picture() -> None:
    page = _PAGE.read_text()
    assert _without(page) == set()
    assert set(_borrowed(page).values()) <= _drawn(page)
    assert not set(_borrowed(page)) & _drawn(page)


def test_a_primitive_without_a_picture_is_told() -> None:
    page = _PAGE.read_text()
    assert _without(page.replace("repl.gather(", "repl.gathered(")) == {"gather"}
    assert _without(page.replace("| `repl.all_sum`", "| ")) == {"all_sum"}
