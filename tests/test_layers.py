# SPDX-License-Identifier: Apache-2.0
"""Imports between packages point downwards, as docs/internals/extending.md says."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import replicator

# From the top; packages of one layer may import one another.
_LAYERS = (
    {"replicator"},
    {"keras", "methods"},
    {"step", "optimizers"},
    {"compressors", "variables", "inputs", "interop"},
    {"primitives", "context"},
    {"graph", "costs", "errors", "_tf"},
)
_ROOT = pathlib.Path(replicator.__file__).parent


def _imported(path: pathlib.Path) -> Iterator[str]:
    """Yields the parts of the library that a file imports as it is loaded."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            top, *rest = node.module.split(".")
            if top == "replicator":
                yield from rest[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top, *rest = alias.name.split(".")
                if top == "replicator":
                    yield from rest[:1]


def test_imports_only_point_downwards() -> None:
    heights = {name: -k for k, layer in enumerate(_LAYERS) for name in layer}
    upwards, seen = [], set()
    for path in _ROOT.rglob("*.py"):
        own = path.relative_to(_ROOT).parts[0].removesuffix(".py")
        if own not in heights:
            continue
        seen.add(own)
        upwards += [
            f"{path.relative_to(_ROOT)} imports {name}"
            for name in _imported(path)
            if heights.get(name, -99) > heights[own]
        ]
    assert seen == set(heights)
    assert upwards == []
