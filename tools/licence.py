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

HEADER = "SPDX-License-Identifier: Apache-2.0"
_ROOT = pathlib.Path(__file__).parents[1]
_GENERATED = "_pb2.py"
# Comments, by the ends of file names.
_COMMENTS = {
    (".py", ".toml", "setup.cfg", "Makefile", ".ci/run"): "# {}",
    (".proto",): "// {}",
    (".css",): "/* {} */",
}


def sources(root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files of code that git tracks, without generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    ends = tuple(end for group in _COMMENTS for end in group)
    return [
        root / name
        for name in listed.stdout.split("\0")
        if name.endswith(ends) and not name.endswith(_GENERATED)
    ]


def header(path: pathlib.Path) -> str:
    """Returns the line, as a comment in the language of a file."""
    name = path.as_posix()
    form = next(form for ends, form in _COMMENTS.items() if name.endswith(ends))
    return form.format(HEADER)


def has_header(path: pathlib.Path, text: str) -> bool:
    """Whether a file has the line; an empty one needs none."""
    return not text.strip() or header(path) in text.splitlines()[:2]


def with_header(path: pathlib.Path, text: str) -> str:
    """Returns the text of a file with the line: first, or below a #! line."""
    if has_header(path, text):
        return text
    if text.startswith("#!"):
        first, _, rest = text.partition("\n")
        return f"{first}\n{header(path)}\n{rest}"
    return f"{header(path)}\n{text}"


def main(argv: Sequence[str]) -> int:
    """Lists or fixes files without the line; returns the exit status."""
    if argv not in ([], ["--write"]):
        print("usage: python tools/licence.py [--write]", file=sys.stderr)
        return 2
    texts = {path: path.read_text() for path in sources(_ROOT)}
    paths = [path for path, text in texts.items() if not has_header(path, text)]
    for path in paths:
        if argv:
            path.write_text(with_header(path, texts[path]))
        print(path.relative_to(_ROOT))
    return int(bool(paths) and not argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
