# SPDX-License-Identifier: Apache-2.0
"""The examples in docstrings run as doctests, and every public docstring has one."""

from __future__ import annotations

import ast
import doctest
import inspect
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from docs._ext import names as names_of_reference
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


_CONNECTED = (
    *("hosts.connection.", "hosts.cluster.", "hosts.resilient."),
    *(
        "report.rows.Row.between",
        "report.rows.Row.within",
        "graph.lowering.record.Wire",
    ),
)


def needs_servers(example: doctest.DocTest) -> bool:
    """Whether tests/hosts/test_connection.py runs it, in a process of its own."""
    return example.name.startswith(_CONNECTED)


def needs_programs(example: doctest.DocTest) -> bool:
    """Whether tests/hosts/asynchronous/test_training.py runs it, in two processes."""
    return example.name.startswith("hosts.asynchronous.")


_HERE = [
    example
    for example in EXAMPLES
    if not needs_servers(example) and not needs_programs(example)
]


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


def _public() -> Iterator[tuple[str, Any]]:
    """Yields what the reference documents: the public names and their members."""
    for full, value in names_of_reference.public().items():
        if names_of_reference.is_error(value):  # what raises an error demonstrates it
            continue
        name = names_of_reference.short(full)
        yield name, value
        if isinstance(value, type):
            for member, own in names_of_reference.own_members(value).items():
                yield f"{name}.{member}", own


_PUBLIC = [pytest.param(value, id=name) for name, value in _public()]


@pytest.mark.parametrize("documented", _PUBLIC)
def test_public_docstring_has_an_example_that_runs(documented: Any) -> None:
    docstring = inspect.getdoc(documented) or ""
    assert "Example:\n    >>> " in docstring, "say by an example what it does"
    assert docstring in {inspect.cleandoc(example.docstring) for example in EXAMPLES}


@pytest.mark.parametrize("documented", _PUBLIC)
def test_public_docstring_says_what_each_argument_is(documented: Any) -> None:
    given = isinstance(documented, type) or not callable(documented)
    own = () if given else inspect.signature(inspect.unwrap(documented)).parameters
    docstring = inspect.getdoc(documented) or ""
    for argument in {*own} - {"self"}:
        assert re.search(rf"^    \*{{0,2}}{argument}:", docstring, re.MULTILINE), (
            argument
        )


def test_the_members_of_all_public_names_are_checked() -> None:
    actual = {param.id for param in _PUBLIC}
    assert actual >= {"Replicator.run", "Step.__call__", "compressors.Link.sum"}
    assert actual >= {"ReplicatedVariable.owner", "Calibration.seconds", "plan.Value"}
    assert not actual & {"ReplicatedVariable.assign", "ReplicatedVariable.key"}
    assert not actual & {"strategy.PS.nodes", "HostLostError"}


def test_examples_are_found_once() -> None:
    actual = [example.name for example in EXAMPLES]
    assert len(actual) == len(set(actual))
    assert {"running.Running.run", "primitives.permute.shift"} <= {*actual}
