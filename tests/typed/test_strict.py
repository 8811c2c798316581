# SPDX-License-Identifier: Apache-2.0
"""`mypy --strict` passes on a program that uses every public name."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import replicator
from replicator import compressors, plan, strategy

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


def test_the_program_uses_every_method() -> None:
    public = {n for n in dir(replicator.Replicator) if not n.startswith("_")}
    assert public - _used("repl") == set()


def test_types_are_installed_with_the_library() -> None:
    assert (_ROOT / "replicator" / "py.typed").exists()
    assert "py.typed" in (_ROOT / "setup.cfg").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [False, True])
def test_mypy_finds_nothing_unless_something_is_wrong(tmp_path, wrong) -> None:
    text = _PROGRAM.read_text()
    if wrong:
        text += "\n\nreplicator.Replicator(devices=3, algorithm=4).all_reduse(1.0)\n"
    program = tmp_path / "program.py"
    program.write_text(text)
    result = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--config-file", _HERE / "mypy.ini"),
            *("--cache-dir", tmp_path / "cache", program),
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    actual = [line for line in result.stdout.splitlines() if "error" in line]
    assert result.returncode == int(wrong), result.stdout + result.stderr
    if wrong:
        assert len([line for line in actual if "arg-type" in line]) == 2
        assert any("all_reduse" in line for line in actual)
