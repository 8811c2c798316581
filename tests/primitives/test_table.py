"""The table of primitives is whole."""

from __future__ import annotations

import pathlib

import pytest

from replicator import primitives
from replicator.primitives import table

SHARED = {
    "algorithms",
    "arithmetic",
    "axes",
    "base",
    "groups",
    "packing",
    "reductions",
    "rooted",
    "sufficient",
    "table",
}
NOT_PRIMITIVES = {"__init__", *SHARED}

FILES = {"recv": "message", "send": "message"}  # the others are called like theirs


def test_each_file_is_a_line_of_the_table() -> None:
    folder = pathlib.Path(primitives.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - NOT_PRIMITIVES
    assert files == {FILES.get(name, name) for name in table.PRIMITIVES}


@pytest.mark.parametrize("name", sorted(table.PRIMITIVES))
def test_each_primitive_has_its_parts_in_its_own_file(name: str) -> None:
    primitive = table.PRIMITIVES[name]
    for part in (primitive.lower, primitive.gradient):
        assert part.__module__ == f"replicator.primitives.{FILES.get(name, name)}"
        assert part.__doc__
    assert table.LOWERINGS[name] is primitive.lower
