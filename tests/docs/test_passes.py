# SPDX-License-Identifier: Apache-2.0
"""The page of the passes draws each, or names it as one that changes no graph."""

from __future__ import annotations

import pathlib
import re

from replicator.step import passes

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "internals" / "passes.md"


def test_each_pass_is_drawn_or_named_as_one_that_changes_nothing() -> None:
    drawings, _, unchanging = PAGE.read_text().partition(
        "## Passes that change no graph"
    )
    drawn = set(re.findall(r'^passes\.show\(\w+, "(\w+)"\)', drawings, re.M))
    named = set(re.findall(r"^- `(\w+)`", unchanging, re.M))
    assert drawn | named == {apply.__name__ for apply in passes.PASSES}
    assert not drawn & named
