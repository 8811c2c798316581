# SPDX-License-Identifier: Apache-2.0
"""Temporary folders end with their owners; nothing else is removed."""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile

import pytest

from replicator.launch import folders, processes

_MAKE = (
    "source = __import__('sys').argv[1]\n"
    "import types; folders = types.ModuleType('folders')\n"
    "exec(source, folders.__dict__)\n"
    "folder = folders.Folder()\n"
    "open(folder.path + '/large', 'w').close()\n"
    "print(folder.path, flush=True)\n"
    "input()\n"
)


@pytest.fixture
def temporary(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def _owner() -> tuple[subprocess.Popen[str], pathlib.Path]:
    """Starts a process with a folder."""
    words = [sys.executable, "-I", "-c", _MAKE, processes.source_of(folders)]
    pipe = subprocess.PIPE
    owner = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    assert owner.stdout
    return owner, pathlib.Path(owner.stdout.readline().strip())


def test_folders_of_processes_that_were_killed_are_removed(
    temporary: pathlib.Path,
) -> None:
    (killed, left), (live, used) = _owner(), _owner()
    pictures = temporary / "replicator-pictures"  # a user's own
    pictures.mkdir()
    killed.kill()
    killed.wait()
    assert (left / "large").exists()
    with folders.Folder() as path:
        assert {*temporary.iterdir()} == {used, pictures, pathlib.Path(path)}
    live.communicate("\n")
    assert live.returncode == 0
    assert [*temporary.iterdir()] == [pictures]


def test_an_owner_may_be_this_process(temporary: pathlib.Path) -> None:
    first = folders.Folder()
    folders.sweep()
    assert pathlib.Path(first.path).exists()
    del first
    assert not [*temporary.iterdir()]
