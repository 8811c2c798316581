# SPDX-License-Identifier: Apache-2.0
"""Checks links in Markdown files to files and headings: `tools/links.py`.

Needs the standard library and no network: links to other hosts are not followed. The
pages in docs/ are checked by Sphinx, too.
"""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator

_ROOT = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
_FENCE = re.compile(r"^(```+|~~~+).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)


def pages(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the Markdown files that git tracks."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.md"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    return [root / name for name in listed.stdout.split("\0") if name]


def dead(page: pathlib.Path) -> Iterator[str]:
    """Yields the links of a page that lead nowhere."""
    text = _FENCE.sub("", page.read_text())
    for target in _LINK.findall(_CODE.sub("", text)):
        parts = urllib.parse.urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        path = page.parent / urllib.parse.unquote(parts.path) if parts.path else page
        if not (path.exists() or path.with_suffix(".md").exists()):
            yield target
        elif parts.fragment and path.suffix == ".md":
            if parts.fragment not in anchors(path.read_text()):
                yield target


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings, by GitHub's rules."""
    result: set[str] = set()
    for heading in _HEADING.findall(_FENCE.sub("", text)):
        plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        result.add(name if name not in result else f"{name}-1")
    return result


def main() -> int:
    """Lists dead links; returns the exit status."""
    found = [
        f"{page.relative_to(_ROOT)}: {target}"
        for page in pages(_ROOT)
        for target in dead(page)
    ]
    print("\n".join(found) or "All links lead somewhere.")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
