# SPDX-License-Identifier: Apache-2.0
"""Fast code is used unless it cannot or must not be; then plain code replaces it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pathlib
import sys

import pytest
import tensorflow as tf

from replicator._tf import choice

_ROOM = pathlib.Path(choice.__file__).parent
# A name of TensorFlow that each file of fast/ needs, and its owner.
_LACKING = {
    "calls": ("tensorflow.python.eager.execute", "execute_with_cancellation"),
    "captures": ("tensorflow.python.ops.handle_data_util", "copy_handle_data"),
    "constants": ("tensorflow.python.framework.op_callbacks", "add_op_callback"),
    "nodes": (
        "tensorflow.python.framework.c_api_util",
        "ScopedTFImportGraphDefResults",
    ),
    "tracing": ("tensorflow.python.framework.func_graph", "func_graph_from_py_func"),
    "variables": ("tensorflow.python.eager.record", "could_possibly_record"),
}


def _module(room: str, file: str):
    return importlib.import_module(f"replicator._tf.{room}.{file}")


def _offered(module) -> dict[str, inspect.Signature]:
    """Returns the signatures of a file's public names in the package, methods too."""
    signatures = {}
    for name, value in vars(module).items():
        if (
            hasattr(choice, name)
            and getattr(value, "__module__", None) == module.__name__
        ):
            signatures[name] = inspect.signature(value)
            for method, function in inspect.getmembers(value, inspect.isfunction):
                if not method.startswith("_"):
                    signatures[f"{name}.{method}"] = inspect.signature(function)
    return signatures


@pytest.fixture(name="anew")
def _anew(monkeypatch):
    """Lets a test choose again, and discards its choice afterwards."""
    monkeypatch.setattr(choice, "FAST", set())
    monkeypatch.delenv("REPLICATOR_FAST", raising=False)
    for file in choice.FILES:
        _module("fast", file)
        monkeypatch.delitem(sys.modules, f"replicator._tf.fast.{file}")
    return monkeypatch


@pytest.mark.parametrize("file", choice.FILES)
def test_both_rooms_offer_the_same_by_the_same_signatures(file):
    fast, plain = (_offered(_module(room, file)) for room in ("fast", "plain"))
    assert fast and fast == plain
    for room in ("fast", "plain"):
        files = sorted(path.stem for path in (_ROOM / room).glob("[!_]*.py"))
        assert files == sorted(choice.FILES)


@pytest.mark.parametrize("file", choice.FILES)
def test_what_is_fast_is_chosen_unless_it_shall_not_be(anew, file):
    assert choice.choose(file).__name__ == f"replicator._tf.fast.{file}"
    assert choice.FAST == {file}
    anew.setenv("REPLICATOR_FAST", "0")
    assert choice.choose(file) is _module("plain", file)
    assert choice.FAST == set()
    anew.setenv("REPLICATOR_FAST", "1")
    choice.choose(file)
    assert choice.FAST == {file}


@pytest.mark.parametrize("file", choice.FILES)
def test_what_is_plain_is_chosen_where_a_name_is_gone(anew, caplog, file):
    module, name = _LACKING[file]
    anew.delattr(importlib.import_module(module), name)
    assert choice.choose(file) is _module("plain", file)
    assert choice.FAST == set()
    assert f"plain/{file}.py" in caplog.text and name in caplog.text


@pytest.mark.parametrize("file", ["captures", "variables"])
def test_what_needs_a_file_that_cannot_be_used_is_not_used(anew, caplog, file):
    anew.delattr(tf.Graph, "_create_op_internal")
    assert choice.choose(file) is _module("plain", file)
    assert "_create_op_internal" in caplog.text


# Each object gets these for itself: its class does not have them.
_OF_OBJECTS = {"_caching_device", "_graph", "_n_operations", "_variable_read"}
_OF_OBJECTS |= {"_validate_shape"}  # HandleVariable needs it too


@pytest.mark.parametrize("file", choice.FILES)
def test_what_is_private_is_looked_up_when_a_file_is_imported(file):
    """If a name is gone, an error in a step would be too late."""
    tree = ast.parse((_ROOM / "fast" / f"{file}.py").read_text())
    imported = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tensorflow."):
            imported |= {alias.asname or alias.name for alias in node.names}
    used, needed = set(), set()
    for node in tree.body:
        assigns = isinstance(node, ast.Assign) and node.targets[0].id == "_NEEDED"
        for part in ast.walk(node):
            if not isinstance(part, ast.Attribute):
                continue
            of, name = part.value, part.attr
            if assigns:
                needed.add(name)
            elif isinstance(of, ast.Name) and of.id in imported:
                used.add(name)
            elif name.startswith("_") and not name.startswith("__"):
                if not (isinstance(of, ast.Name) and of.id == "self"):
                    used.add(name)
    assert not used - needed - _OF_OBJECTS
