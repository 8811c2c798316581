# SPDX-License-Identifier: Apache-2.0
"""Each environment that runs tests has what tests/conftest.py imports."""

from __future__ import annotations

import ast
import configparser
import importlib.metadata
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
OURS, ALWAYS_THERE = {"tests", "replicator"}, {"tensorflow", "keras"}


def _imported(path: pathlib.Path, seen: set[pathlib.Path]) -> set[str]:
    """Returns the packages of others that a test module imports, and those it uses."""
    seen.add(path)
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
    packages = {name.partition(".")[0] for name in names}
    for name in names:
        used = ROOT.joinpath(*name.split(".")).with_suffix(".py")
        if name.startswith("tests.") and used.exists() and used not in seen:
            packages |= _imported(used, seen)
    return packages - sys.stdlib_module_names - OURS - ALWAYS_THERE


def _required(extra: str) -> set[str]:
    """Returns the distributions that an environment has by setup.cfg."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    text = (
        config["options"]["install_requires"] + config["options.extras_require"][extra]
    )
    return {
        re.split(r"[^\w.-]", line.strip())[0].lower().replace("_", "-")
        for line in text.splitlines()
    }


@pytest.mark.parametrize("extra", ["test", "clients"])
def test_what_conftest_imports_is_installed(extra: str) -> None:
    packages = _imported(ROOT / "tests" / "conftest.py", set())
    assert {"pytest", "hypothesis", "numpy", "sonnet"} <= packages
    homes = importlib.metadata.packages_distributions()
    for package in packages:
        distributions = {home.lower().replace("_", "-") for home in homes[package]}
        assert distributions & _required(extra), package
