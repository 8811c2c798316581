# SPDX-License-Identifier: Apache-2.0
"""The package of TensorFlow's private names: complete, exported and tested."""

from __future__ import annotations

import ast
import pathlib

from replicator._tf import choice

_ROOM = pathlib.Path(choice.__file__).parent
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


def _used() -> set[tuple[str, str]]:
    """Returns the files of the package, and names of theirs, that other rooms use."""
    used = set()
    for path in _ROOM.parent.rglob("*.py"):
        if _ROOM in path.parents:
            continue
        files, nodes = {}, list(ast.walk(ast.parse(path.read_text())))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == "replicator._tf":
                files |= {
                    alias.asname or alias.name: alias.name for alias in node.names
                }
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if node.value.id in files:
                    used.add((files[node.value.id], node.attr))
    return used


_USED = _used()
_OFFERED = [
    (file, name)
    for file in _FILES
    for name in _names(file)
    if ("choice" if "/" in file else file, name) in _USED
]


def test_each_name_is_called_in_the_tests_of_its_file():
    missing = []
    for file, name in _OFFERED:
        folder, _, stem = file.rpartition("/")
        text = (_TESTS / f"test_{'twins' if folder else stem}.py").read_text()
        twins = [f"twin.{name}", f"fast.{name}"]
        if not any(call in text for call in (twins if folder else [f"{stem}.{name}"])):
            missing.append(f"{file}.{name}")
    assert _OFFERED and not missing


def test_the_room_has_what_others_use_or_its_files_share():
    own = {name for file in _FILES for name in _names(file)}
    shared = own - {name for _, name in _USED}
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
