# SPDX-License-Identifier: Apache-2.0
"""What a host answers: a free port, its addresses, its versions."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

import replicator
from replicator.launch import processes, questions


def test_a_port_is_free() -> None:
    with socket.create_server(("", questions.free_port())) as listening:
        assert listening.getsockname()[1] != 0


def test_a_port_is_found_anywhere(tmp_path: pathlib.Path) -> None:
    argv = [sys.executable, "-I", "-c", processes.source_of(questions), "port"]
    assert 0 < json.loads(subprocess.check_output(argv, cwd=tmp_path)) < 65536


def test_sources_are_the_addresses_of_the_ways() -> None:
    assert questions.sources("127.0.0.1", []) == ["127.0.0.1"]
    # By its own way, 127.0.0.1 reaches the others; they see that, too.
    assert questions.sources("127.0.0.2", ["127.0.0.3"]) == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize(
    "own", ["192.0.2.77", "2001:db8::77", "no number"], ids=["IPv4", "IPv6", "name"]
)
def test_a_translated_address_has_none(own: str) -> None:
    assert questions.sources(own, ["127.0.0.1"]) is None


def test_versions_are_those_of_the_installed_packages() -> None:
    actual = questions.versions()
    names = importlib.metadata.packages_distributions()["tensorflow"]
    assert actual["tensorflow"] in {importlib.metadata.version(name) for name in names}
    assert actual["replicator"]
    assert actual["path"] == str(pathlib.Path(replicator.__file__).parent)


def test_the_script_imports_nothing_large(tmp_path: pathlib.Path) -> None:
    source = processes.source_of(questions)
    check = "\nimport sys; assert not {'tensorflow', 'replicator'} & {*sys.modules}"
    result = subprocess.run(
        [sys.executable, "-I", "-c", source + check, "versions", "/", ""],
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
    source = processes.source_of(questions)
    stdout = subprocess.check_output(
        [python, "-c", source, "versions", "/", ""],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ""},
    )
    facts = json.loads(stdout.splitlines()[-1])
    assert (facts["replicator"], facts["path"]) == (None, None)
