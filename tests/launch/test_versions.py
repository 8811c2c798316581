# SPDX-License-Identifier: Apache-2.0
"""The versions installed on a host."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys

import pytest

import replicator
from replicator.launch import versions


def test_versions_are_those_of_the_installed_packages() -> None:
    actual = versions.versions()
    names = importlib.metadata.packages_distributions()["tensorflow"]
    assert actual["tensorflow"] in {importlib.metadata.version(name) for name in names}
    assert actual["replicator"]
    assert actual["path"] == str(pathlib.Path(replicator.__file__).parent)


def test_the_script_imports_nothing_large(tmp_path: pathlib.Path) -> None:
    source = pathlib.Path(versions.__file__).read_text()
    check = "\nimport sys; assert not {'tensorflow', 'replicator'} & {*sys.modules}"
    result = subprocess.run(
        [sys.executable, "-I", "-c", source + check, "/", ""],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(result.stdout.splitlines()[-1])
    keys = {"replicator", "tensorflow", "path", "folder", "script"}
    assert facts.keys() == keys


@pytest.mark.parametrize("file", ["other.txt", "__init__.py"])
def test_another_folder_of_this_name_is_no_package(
    tmp_path: pathlib.Path, file: str
) -> None:
    (tmp_path / "replicator").mkdir()
    (tmp_path / "replicator" / file).touch()
    python = os.path.realpath(sys.executable)  # which has none
    source = pathlib.Path(versions.__file__).read_text()
    stdout = subprocess.check_output(
        [python, "-c", source, "/", ""],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
    )
    facts = json.loads(stdout.splitlines()[-1])
    assert (facts["replicator"], facts["path"]) == (None, None)
