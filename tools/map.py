# SPDX-License-Identifier: Apache-2.0
"""Prints every file of replicator/ with its first line: `make map`."""

from __future__ import annotations

import ast
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
_WIDTH = 30  # of the column of names


def lines(folder: pathlib.Path) -> list[str]:
    """Returns a line for each file in a folder, packages after modules."""
    found = []
    for path in sorted(folder.rglob("*.py"), key=_place):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        place = path.relative_to(folder.parent)
        is_package = path.name == "__init__.py"
        name = f"{place.parent.name}/" if is_package else path.name
        indent = "  " * (len(place.parts) - 1 - is_package)
        found.append(f"{indent + name:{_WIDTH}} {text.partition(chr(10))[0]}".rstrip())
    return found


def _place(path: pathlib.Path) -> list[tuple[bool, str]]:
    """Sorts a package's own file first, then its modules, then its packages."""
    *folders, name = path.parts
    own = "" if name == "__init__.py" else name
    return [*((True, folder) for folder in folders), (False, own)]


if __name__ == "__main__":
    print("\n".join(lines(ROOT / "replicator")))
