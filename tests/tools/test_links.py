# SPDX-License-Identifier: Apache-2.0
"""No Markdown file has a link that leads nowhere."""

from __future__ import annotations

import pytest

from tools import links


def test_all_links_lead_somewhere() -> None:
    pages = links.pages(links._ROOT)
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md"} <= {p.name for p in pages}
    assert {
        str(p): dead_links for p in pages if (dead_links := list(links.dead(p)))
    } == {}


@pytest.mark.parametrize(
    ("text", "dead"),
    [
        ("[a](other.md)", []),
        ("[a](nowhere.md)", ["nowhere.md"]),
        ("[a](other.md#two-words)", []),
        ("[a](other.md#three-words)", ["other.md#three-words"]),
        ("# Here I am\n[a](#here-i-am) [b](#there)", ["#there"]),
        ("![a](missing.png)", ["missing.png"]),
        ("[a](https://example.org/nowhere.md)", []),
        ("```\n[a](nowhere.md)\n```\n`[a](nowhere.md)`", []),
        ("[![a](missing.png)](other.md)", []),
    ],
)
def test_dead_links_are_found(tmp_path, text, dead) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## Two `words`\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    assert list(links.dead(page)) == dead
