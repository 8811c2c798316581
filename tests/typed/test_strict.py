# SPDX-License-Identifier: Apache-2.0
"""`mypy --strict` passes on a program that uses every public name and member."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import replicator
from docs._ext import names
from replicator import compressors, plan, strategy
from tests.typed import members

_HERE = pathlib.Path(__file__).parent
_ROOT = _HERE.parents[1]
_PROGRAM = _HERE / "uses_all.py"


def _used(of: str) -> set[str]:
    """Returns the attributes of a name that the program uses."""
    return {
        node.attr
        for node in ast.walk(ast.parse(_PROGRAM.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == of
    }


@pytest.mark.parametrize("module", [replicator, strategy, compressors, plan])
def test_the_program_uses_every_public_name(module) -> None:
    name = module.__name__.rpartition(".")[2]
    modules = {"strategy"} if module is replicator else set()  # it imports that
    assert set(module.__all__) - modules - _used(name) == set()


def test_types_are_installed_with_the_library() -> None:
    assert (_ROOT / "replicator" / "py.typed").exists()
    assert "py.typed" in (_ROOT / "setup.cfg").read_text()


def _mypy(folder: pathlib.Path, text: str) -> subprocess.CompletedProcess[str]:
    """Runs mypy on a program, as in a user's folder."""
    program = folder / "program.py"
    program.write_text(text)
    return subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", _HERE / "mypy.ini"),
            *("--cache-dir", folder / "cache", program),
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the programs of this file, and of mypy's cache."""
    return tmp_path_factory.mktemp("typed")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_mypy_finds_nothing_unless_something_is_wrong(folder, wrong) -> None:
    text = _PROGRAM.read_text()
    if wrong:
        text += _WRONG
    result = _mypy(folder, text)
    actual = [line for line in result.stdout.splitlines() if "error" in line]
    assert result.returncode == int(wrong), result.stdout + result.stderr
    if wrong:
        assert len([line for line in actual if "[arg-type]" in line]) == 3
        assert len([line for line in actual if "[call-arg]" in line]) == 2
        for text in ("all_reduse", 'overload variant of "connect"'):
            assert any(text in line for line in actual)


_WRONG = """

replicator.Replicator(devices=3, algorithm=4).all_reduse(1.0)
replicator.Replicator().all_reduce(1.0, opp="mean")  # each method knows its arguments
replicator.Replicator().build(3)
replicator.Replicator().context(1.0)
replicator.connect(timeout="long")
"""


def _members() -> set[tuple[type, str]]:
    """Returns what the reference shows of all classes, by class."""
    classes = [value for value in names.public().values() if isinstance(value, type)]
    return {
        (cls, member)
        for cls in classes
        for member in (*names.own_members(cls), *names.attributes(cls))
    }


@pytest.mark.slow
def test_the_program_uses_every_member_of_a_value_of_known_type(folder) -> None:
    text = _PROGRAM.read_text()
    used = members.used(text, lambda revealing: _mypy(folder, revealing).stdout)
    assert _members() - used == set()


def test_members_are_those_of_the_reference() -> None:
    expected = {
        (plan.Wire, "seconds"),
        (plan.Row, "between"),
        (replicator.Cluster, "host_id"),
        (replicator.Replicator, "run"),
        (strategy.Rules, "hidden"),
    }
    assert _members() >= expected
