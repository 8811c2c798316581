# SPDX-License-Identifier: Apache-2.0
"""The files that `--sync` copies."""

from __future__ import annotations

import asyncio
import pathlib
import subprocess
import sys

import pytest

from replicator.launch import sync


def _files(folder: pathlib.Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


def test_what_git_does_not_ignore(tmp_path: pathlib.Path) -> None:
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    _files(tmp_path, "tracked", "gone", "new", "data/ignored", ".hidden", "a/b c")
    (tmp_path / ".gitignore").write_text("data\n")
    subprocess.run(["git", "-C", str(tmp_path), "add", "tracked", "gone"], check=True)
    (tmp_path / "gone").unlink()
    names, which = asyncio.run(sync.choose(str(tmp_path)))
    assert names == [".gitignore", ".hidden", "a/b c", "new", "tracked"]
    assert which == "files that git does not ignore"


def _git(folder: pathlib.Path, *words: str) -> None:
    who = (
        "-c",
        "user.name=a",
        "-c",
        "user.email=a@b",
        "-c",
        "protocol.file.allow=always",
    )
    command = ["git", "-C", str(folder), *who, *words]
    subprocess.run(command, check=True, capture_output=True)


def test_submodules_and_other_working_trees_within(tmp_path: pathlib.Path) -> None:
    other, work = tmp_path / "other", tmp_path / "work"
    for folder in (other, work, work / "nested", work / "nested" / "deep"):
        folder.mkdir()
        _git(folder, "init", "--quiet")
    _files(other, "f")
    _git(other, "add", "f")
    _git(other, "commit", "-m", "f")
    _files(work, "top", "nested/g", "nested/ignored", "nested/deep/h")
    (work / "nested" / ".gitignore").write_text("ignored")
    for name in ("sub", "empty"):
        _git(work, "submodule", "add", "--quiet", str(other), name)
    _files(work, "sub/new")
    _git(work, "submodule", "deinit", "--force", "empty")
    (work / "link").symlink_to("nested")
    (work / "broken").symlink_to("nothing")
    names, which = asyncio.run(sync.choose(str(work)))
    expected = [".gitmodules", "nested/.gitignore", "nested/deep/h", "nested/g"]
    assert names == [*expected, "sub/f", "sub/new", "top"]
    assert which == "files that git does not ignore (without broken, empty, link)"


@pytest.mark.parametrize("has_filters", [False, True])
def test_every_python_unpacks(tmp_path: pathlib.Path, has_filters: bool) -> None:
    _files(tmp_path, "a", "b/c")
    packed = sync.pack(str(tmp_path), ["a", "b/c"])
    old = (  # as before 3.11.4
        "import tarfile; del tarfile.data_filter; every = tarfile.TarFile.extractall\n"
        "tarfile.TarFile.extractall = lambda self, path: every(self, path)\n"
    )
    script = sync.unpacker() if has_filters else old + sync.unpacker()
    target = tmp_path / "target"
    command = [sys.executable, "-I", "-c", script, str(target)]
    subprocess.run(command, input=packed, check=True)
    assert (target / "b" / "c").read_text() == "b/c"


def test_what_is_small_and_not_hidden(tmp_path: pathlib.Path) -> None:
    _files(tmp_path, "a", "b/c", ".hidden/d", ".e", "__pycache__/f")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(sync.MOST_BYTES)
    (tmp_path / "link").symlink_to("b")
    names, which = asyncio.run(sync.choose(str(tmp_path)))
    assert names == ["a", "b/c"]
    assert which == "files below 10 MiB (without link)"
