# SPDX-License-Identifier: Apache-2.0
"""The licence header: `python tools/licence.py` lists files without it.

With --write it adds the line: SPDX's short form of the licence's 13-line header, which
tools can read. Needs the standard library only.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Sequence

HEADER = "# SPDX-License-Identifier: Apache-2.0"
_ROOT = pathlib.Path(__file__).parents[1]
_GENERATED = "_pb2.py"


def sources(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the Python files that git tracks, without generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "*.py"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    names = filter(None, listed.stdout.split("\0"))
    return [root / name for name in names if not name.endswith(_GENERATED)]


def has_header(text: str) -> bool:
    """Whether a file has the line; an empty one needs none."""
    return not text.strip() or HEADER in text.splitlines()[:2]


def with_header(text: str) -> str:
    """Returns the text of a file with the line: first, or below a #! line."""
    if has_header(text):
        return text
    if text.startswith("#!"):
        first, _, rest = text.partition("\n")
        return f"{first}\n{HEADER}\n{rest}"
    return f"{HEADER}\n{text}"


def main(argv: Sequence[str]) -> int:
    """Lists or fixes files without the line; returns the exit status."""
    if argv not in ([], ["--write"]):
        print("usage: python tools/licence.py [--write]", file=sys.stderr)
        return 2
    paths = [path for path in sources(_ROOT) if not has_header(path.read_text())]
    for path in paths:
        if argv:
            path.write_text(with_header(path.read_text()))
        print(path.relative_to(_ROOT))
    return int(bool(paths) and not argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
