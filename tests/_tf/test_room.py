# SPDX-License-Identifier: Apache-2.0
"""The package of TensorFlow's private names: complete, exported and tested."""

from __future__ import annotations

import ast
import pathlib

import pytest

from replicator import _tf

_ROOM = pathlib.Path(_tf.__file__).parent
_TESTS = pathlib.Path(__file__).parent
_FILES = sorted(
    path.relative_to(_ROOM).with_suffix("").as_posix()
    for path in _ROOM.rglob("*.py")
    if path.name not in ("__init__.py", "choice.py")
)


def _names(file: str) -> list[str]:
    """Returns the public names of a file of the package."""
    names = []
    for node in ast.parse((_ROOM / f"{file}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets]
    return [name for name in names if not name.startswith("_")]


def _imported(file: str) -> set[str]:
    """Returns the files of the package that one of them imports."""
    files = set()
    for node in ast.walk(ast.parse((_ROOM / f"{file}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            path = (node.module or "").split(".")
            if path[:2] == ["replicator", "_tf"]:
                files.add("/".join(path[2:]))
    return files


_OFFERED = [
    (file, name) for file in _FILES for name in _names(file) if hasattr(_tf, name)
]


@pytest.mark.parametrize("file, name", _OFFERED)
def test_each_name_is_called_in_the_file_of_tests_at_the_mirror_path(file, name):
    folder, _, stem = file.rpartition("/")
    room = stem if folder == "plain" else "_tf"
    assert f"{room}.{name}" in (_TESTS / folder / f"test_{stem}.py").read_text()


def test_the_room_offers_what_its_files_do_not_share_among_themselves():
    offered = [name for file, name in _OFFERED if not file.startswith("plain/")]
    assert sorted(offered) == sorted(_tf.__all__)
    shared = {name for file in _FILES for name in _names(file)} - set(_tf.__all__)
    text = "".join((_ROOM / f"{file}.py").read_text() for file in _FILES)
    assert not {name for name in shared if text.count(name) < 3}


def test_no_file_of_the_room_imports_itself_by_others():
    above = {file: _imported(file) for file in _FILES}
    left = set(_FILES)
    while ready := {file for file in left if not above[file] & left}:
        left -= ready
    assert not left


def test_only_this_room_knows_private_names():
    for path in _ROOM.parent.rglob("*.py"):
        if _ROOM not in path.parents:
            text = path.read_text()
            for private in ("tensorflow.python", "tensorflow.core"):
                assert f"import {private}" not in text, path
                assert f"from {private}" not in text, path
