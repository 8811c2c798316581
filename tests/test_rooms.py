# SPDX-License-Identifier: Apache-2.0
"""Rooms, the packages and modules at the top level, import each other in no circle."""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib
from collections.abc import Iterator

import replicator

ROOT = pathlib.Path(replicator.__file__).parent


def _module(file: pathlib.Path) -> str:
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {_module(file): file for file in ROOT.rglob("*.py")}


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yields the library's modules that a file imports, wherever it does so."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level and node.module, ast.unparse(node)
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in FILES else node.module


def _room(module: str) -> str:
    return ".".join(module.split(".")[:2])


@functools.cache
def _rooms() -> dict[str, set[str]]:
    """Returns which rooms each room imports, apart from the library's public names."""
    rooms: dict[str, set[str]] = {}
    for module, file in FILES.items():
        own, tree = _room(module), ast.parse(file.read_text())
        found = {_room(name) for name in _imported(tree)} - {own, ROOT.name}
        if own != ROOT.name:
            rooms.setdefault(own, set()).update(found & set(map(_room, FILES)))
    return rooms


def test_the_rooms_form_no_circle() -> None:
    """A room can be read and tested without those that import it."""
    rooms = _rooms()
    assert rooms["replicator.step"] >= {"replicator.graph", "replicator.variables"}
    order = list(graphlib.TopologicalSorter(rooms).static_order())
    assert order.index("replicator.step") < order.index("replicator.replicator")


def test_the_core_knows_no_hosts() -> None:
    """Connecting is above the core, which knows only the processes of its peers."""
    above = {r for r, found in _rooms().items() if "replicator.hosts" in found}
    assert above <= {f"replicator.{r}" for r in ("autodist", "calibrate", "replicator")}


def test_the_map_lists_the_rooms_in_their_order() -> None:
    """A room imports only rooms that WORKSPACE.md lists above it."""
    text = (ROOT.parent / "WORKSPACE.md").read_text()
    block = text.partition("## Rooms")[2].split("```")[1]
    names = [line.partition("  ")[0] for line in block.splitlines() if line[:1].strip()]
    listed = [n.strip().rstrip("/") for name in names for n in name.split(",")]
    missing = {"__main__", "version"}
    rooms = {r.removeprefix("replicator."): found for r, found in _rooms().items()}
    assert sorted(listed) == sorted(rooms.keys() - missing)
    for k, name in enumerate(listed):
        above = {f"replicator.{n}" for n in [*listed[:k], *missing]}
        assert rooms[name] <= above, f"{name} imports {rooms[name] - above}"
