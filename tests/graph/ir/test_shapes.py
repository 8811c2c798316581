# SPDX-License-Identifier: Apache-2.0
"""Static shapes are plain numbers under either TensorFlow behavior."""

from __future__ import annotations

import ast
import pathlib
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.graph.ir import shapes

SHAPES: dict[str, Any] = {
    "scalar": (),
    "known": (2, 3),
    "partly": (None, 3),
    "unknown": (None, None),
    "rank": None,
}


@pytest.mark.parametrize("name", SHAPES)
def test_sizes_are_numbers(name: str, behavior: None) -> None:
    expected = SHAPES[name]
    with tf.Graph().as_default():
        tensor = tf.compat.v1.placeholder(tf.float32, expected)
    assert shapes.static(tensor) == expected
    if expected is None:
        with pytest.raises(AssertionError):
            shapes.sizes(tensor)
        assert shapes.size(tensor, 1) is None
        return
    assert shapes.sizes(tensor) == expected
    assert [shapes.size(tensor, k) for k in range(len(expected))] == list(expected)
    assert all(type(size) in (int, type(None)) for size in shapes.sizes(tensor))
    if None not in expected:
        assert shapes.defined(tensor) == expected
    else:
        with pytest.raises(AssertionError):
            shapes.defined(tensor)


@pytest.mark.parametrize("name", ["known", "partly", "unknown", "rank"])
@pytest.mark.parametrize("rows", [None, 5])
def test_rows_are_replaced(name: str, rows: int | None, behavior: None) -> None:
    known = SHAPES[name]
    shape = shapes.with_rows(tf.TensorShape(known), rows)
    if known is None:
        assert shape.rank is None
    else:
        assert shape.as_list() == [rows, *known[1:]]


# Their `shape` is a tuple of plain numbers: of a Value, a Cut, a NumPy array, a Node.
_STRATEGY = pathlib.Path("strategy")
_TUPLES = {
    "cuts.py",
    "axes.py",
    "fetched.py",
    "all_to_all.py",
    "match.py",
    "near_misses.py",
    "part_markers.py",
    "part_ops.py",
    "placeholder.py",
}


def _taken_apart(tree: ast.AST) -> list[int]:
    """Returns the lines that index, unpack, iterate over or measure an `x.shape`.

    Also those that do so to a part of one, or to a name that is assigned one or a
    tf.TensorShape in the same function.
    """
    lines: list[int] = []
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for scope in (tree, *functions):
        lines += _taken_apart_in(scope)
    return sorted(set(lines))


def _taken_apart_in(scope: ast.AST) -> list[int]:
    names: set[str] = set()

    def is_shape(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in names
        if isinstance(node, ast.Subscript):
            return isinstance(node.slice, ast.Slice) and is_shape(node.value)
        return isinstance(node, ast.Attribute) and node.attr == "shape"

    if isinstance(scope, ast.FunctionDef):
        names |= {
            target.id
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign)
            if is_shape(node.value) or _makes_shape(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    lines = []
    for node in ast.walk(scope):
        values: list[ast.AST] = []
        if isinstance(node, ast.Subscript):
            # A slice of a tf.TensorShape is one.
            values = [] if isinstance(node.slice, ast.Slice) else [node.value]
        elif isinstance(node, ast.For | ast.comprehension):
            values = [node.iter]
        elif isinstance(node, ast.Starred):
            values = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("tuple", "list", "min", "max", "map", "zip", "len"):
                values = node.args
        lines += [value.lineno for value in values if is_shape(value)]  # type: ignore
    return lines


def _makes_shape(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "tf.TensorShape"


def test_no_other_file_takes_a_shape_apart() -> None:
    room = pathlib.Path(replicator.__file__).parent
    actual = {
        f"{path.relative_to(room)}:{line}"
        for path in room.rglob("*.py")
        if path.name not in _TUPLES and _STRATEGY not in path.relative_to(room).parents
        for line in _taken_apart(ast.parse(path.read_text()))
    }
    assert not actual
