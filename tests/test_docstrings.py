# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run as doctests, and every public docstring has one."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import pathlib
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.plan import Plan
from replicator.step.steps import Step
from tests import helpers

_PACKAGE = pathlib.Path(replicator.__file__).parent
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_DOCUMENTED = ast.ClassDef | ast.FunctionDef


def _nodes(tree: ast.AST, around: str) -> Iterator[tuple[str, _DOCUMENTED]]:
    """Yields all classes and functions, by their names in the package."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _DOCUMENTED):
            name = f"{around}.{node.name}"
            yield name, node
            yield from _nodes(node, name)


def _examples() -> Iterator[doctest.DocTest]:
    """Yields the docstrings with examples.

    Read from the sources: doctest's own finder attributes a decorated function to the
    decorator's module, and skips it.
    """
    parser = doctest.DocTestParser()
    for path in sorted(_PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(_PACKAGE).with_suffix("").parts)
        tree = ast.parse(path.read_text())
        documented: list[tuple[str, Any]] = [(module, tree), *_nodes(tree, module)]
        for name, node in documented:
            docstring = ast.get_docstring(node, clean=False)
            if docstring and ">>>" in docstring:
                line = node.body[0].lineno - 1  # doctest counts from 0
                yield parser.get_doctest(docstring, {}, name, str(path), line)


EXAMPLES = tuple(_examples())


_CONNECTED = ("cluster.connection.", "cluster.cluster.", "cluster.resilient.")


def needs_servers(example: doctest.DocTest) -> bool:
    """Whether tests/cluster/test_connection.py runs it, in a process of its own."""
    return example.name.startswith(_CONNECTED)


_HERE = [example for example in EXAMPLES if not needs_servers(example)]


@pytest.fixture
def names(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The predefined names of examples, whose files are temporary."""
    monkeypatch.chdir(tmp_path)
    return {
        "__name__": __name__,  # by which AutoGraph finds the sources of functions
        "json": json,
        "pathlib": pathlib,
        "np": np,
        "repl": helpers.make(2),
        "replicator": replicator,
        "tf": tf,
    }


@pytest.mark.parametrize("example", _HERE, ids=lambda example: example.name)
def test_example(example: doctest.DocTest, names: dict[str, Any]) -> None:
    example.globs = names
    try:
        doctest.DebugRunner(optionflags=_FLAGS).run(example)
    except doctest.DocTestFailure as failure:
        pytest.fail(
            f"{example.filename}:{example.lineno + failure.example.lineno + 1}\n"
            f"{failure.example.source}expected:\n{failure.example.want}"
            f"got:\n{failure.got}",
            pytrace=False,
        )
    except doctest.UnexpectedException as failure:
        raise failure.exc_info[1] from None


_CLASSES = [
    *(getattr(replicator, name) for name in replicator.__all__),
    *(Plan, Step),
]


def _public() -> Iterator[tuple[str, Any]]:
    """Yields the public names, and their members with a docstring of ours."""
    for cls in _CLASSES:
        if not isinstance(cls, type):
            yield cls.__name__, cls
            continue
        if issubclass(cls, Exception):  # what raises an error demonstrates it
            continue
        yield cls.__name__, cls
        if issubclass(cls, tf.Variable):  # its methods are those of tf.Variable
            continue
        for name in dir(cls):
            member = inspect.getattr_static(cls, name)
            if name.startswith("_") or not _is_ours(member):
                continue
            yield f"{cls.__name__}.{name}", getattr(cls, name)


def _is_ours(member: Any) -> bool:
    """Whether a member of a class is a method or property that we wrote."""
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    if not isinstance(function, types.FunctionType):
        return False
    return inspect.unwrap(function).__module__.startswith("replicator.")


@pytest.mark.parametrize(
    "documented", [pytest.param(value, id=name) for name, value in _public()]
)
def test_public_docstring_has_an_example_that_runs(documented: Any) -> None:
    docstring = inspect.getdoc(documented) or ""
    assert "Example:\n    >>> " in docstring, "say by an example what it does"
    assert docstring in {inspect.cleandoc(example.docstring) for example in EXAMPLES}


def test_examples_are_found_once() -> None:
    actual = [example.name for example in EXAMPLES]
    assert len(actual) == len(set(actual))
    assert {"running.Running.run", "primitives.permute.shift"} <= {*actual}
