# SPDX-License-Identifier: Apache-2.0
"""Deprecations warn at the user's line, and nothing outlives its announced removal."""

from __future__ import annotations

import ast
import importlib.metadata
import pathlib
import warnings

import pytest

import replicator
from replicator import deprecation

_ROOT = pathlib.Path(replicator.__file__).parent


@deprecation.deprecated(since="0.2", removed_in="0.4", use="new(x)")
def old(x: int) -> int:
    """Doubles."""
    return 2 * x


def test_what_is_deprecated_works_and_names_its_replacement_and_versions() -> None:
    message = (
        r"^old is deprecated since replicator 0\.2 and will be removed in 0\.4\. "
        r"Use new\(x\)\.$"
    )
    with pytest.warns(DeprecationWarning, match=message) as caught:
        assert old(3) == 6
    assert caught[0].filename == __file__
    assert pathlib.Path(__file__).read_text().splitlines()[caught[0].lineno - 1] == (
        "        assert old(3) == 6"
    )


def test_documentation_says_so_too() -> None:
    assert old.__doc__ is not None
    assert old.__doc__.startswith("Doubles.\n\nDeprecated since 0.2")


def test_it_is_an_error_where_warnings_are() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(DeprecationWarning):
            old(1)


def _announced(source: str) -> list[tuple[str, str]]:
    """Returns the versions (since, removed_in) of all calls that have both as text."""
    versions = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            keywords = {
                k.arg: k.value.value
                for k in node.keywords
                if isinstance(k.value, ast.Constant)
            }
            if {"since", "removed_in"} <= set(keywords):
                versions.append((keywords["since"], keywords["removed_in"]))
    return versions


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _overdue(source: str, version: str) -> list[str]:
    return [
        removed
        for since, removed in _announced(source)
        if _numbers(version) >= _numbers(removed)
        or _numbers(removed) < (_numbers(since)[0], _numbers(since)[1] + 2)
    ]


def test_nothing_stays_longer_or_shorter_than_announced() -> None:
    for path in _ROOT.rglob("*.py"):
        assert _overdue(path.read_text(), replicator.__version__) == [], path
    source = pathlib.Path(__file__).read_text()
    assert _overdue(source, "0.3.9") == [] and _overdue(source, "0.4.0") == ["0.4"]
    assert _overdue("warn('x', since='0.2', removed_in='0.3', use='y')", "0.2") == [
        "0.3"
    ]


def test_the_version_is_in_one_place() -> None:
    text = (_ROOT / "version.py").read_text()
    assert f'__version__ = "{replicator.__version__}"' in text
    settings = (_ROOT.parent / "setup.cfg").read_text()
    assert "version = attr: replicator.version.__version__" in settings
    try:
        installed = importlib.metadata.version("replicator")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("replicator is not installed")
    assert installed == replicator.__version__
