# SPDX-License-Identifier: Apache-2.0
"""The table of primitives is complete."""

from __future__ import annotations

import ast
import pathlib

import pytest

import replicator
from replicator import primitives
from replicator.primitives import table

# The other primitives' files have their names.
FILES = {"recv": "message", "send": "message"}


def test_each_file_is_a_line_of_the_table() -> None:
    folder = pathlib.Path(primitives.__file__).parent
    texts = {path.stem: path.read_text() for path in folder.glob("*.py")}
    files = {stem for stem, text in texts.items() if "\ndef lower(" in text}
    assert files == {FILES.get(name, name) for name in table.PRIMITIVES}


@pytest.mark.parametrize("name", sorted(table.PRIMITIVES))
def test_each_primitive_has_its_parts_in_its_own_file(name: str) -> None:
    primitive = table.PRIMITIVES[name]
    for part in (primitive.lower, primitive.gradient):
        assert part.__module__ == f"replicator.primitives.{FILES.get(name, name)}"
        assert part.__doc__
    assert table.LOWERINGS[name] is primitive.lower


# Packages whose passes use a primitive's facts, never its name.
PASSES = ("costs", "graph", "plan", "step")


@pytest.mark.parametrize("folder", PASSES)
def test_no_pass_names_a_primitive(folder: str) -> None:
    room = pathlib.Path(replicator.__file__).parent / folder
    named = {
        f"{path.name}:{node.lineno}"
        for path in room.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in table.PRIMITIVES
    }
    assert named == set()
