# SPDX-License-Identifier: Apache-2.0
"""The files that `--sync` copies."""

from __future__ import annotations

import asyncio
import pathlib
import subprocess

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


def test_what_is_small_and_not_hidden(tmp_path: pathlib.Path) -> None:
    _files(tmp_path, "a", "b/c", ".hidden/d", ".e", "__pycache__/f")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(sync.MOST_BYTES)
    names, which = asyncio.run(sync.choose(str(tmp_path)))
    assert names == ["a", "b/c"]
    assert which == "files below 10 MiB"
