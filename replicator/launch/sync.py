# SPDX-License-Identifier: Apache-2.0
"""`--sync`: copies the working directory to another host."""

from __future__ import annotations

import asyncio
import io
import os
import pathlib
import tarfile
from collections.abc import Iterable

MOST_BYTES = 10 << 20  # per file, outside of git's working trees
_MOST_NAMED = 5
# Pythons before 3.11.4 have no filters; the archive is the launcher's own.
_UNPACK = (
    "import os,sys,tarfile;os.makedirs(sys.argv[1],exist_ok=True);"
    "given={'filter':'data'} if hasattr(tarfile,'data_filter') else {};"
    "tarfile.open(fileobj=sys.stdin.buffer,mode='r|gz').extractall(sys.argv[1],**given)"
)


async def choose(folder: str) -> tuple[list[str], str]:
    """Returns the files to copy, as paths in the folder, and a description of them.

    In a working tree of git, and in those within it, these are the files that git does
    not ignore; elsewhere, all files below 10 MiB that are not hidden. Links to folders
    are not followed. The description names what else is left out.
    """
    names = await _in_git(folder)
    files, left_out = _small(folder) if names is None else await _tree(folder, names)
    description = (
        "files below 10 MiB" if names is None else "files that git does not ignore"
    )
    if left_out:
        more = len(left_out) - _MOST_NAMED
        examples = ", ".join(sorted(left_out)[:_MOST_NAMED])
        description += f" (without {examples}{f' and {more} more' if more > 0 else ''})"
    return sorted(files), description


async def _in_git(folder: str) -> list[str] | None:
    """Returns what git does not ignore in a folder; None if it is not in git."""
    try:
        git = await asyncio.create_subprocess_exec(
            *("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        stdout, _ = await git.communicate()
    except FileNotFoundError:  # no git here
        return None
    if git.returncode != 0:
        return None
    return sorted({os.fsdecode(name) for name in stdout.split(b"\0") if name})


async def _tree(folder: str, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns the files among git's names, and whatever exists but is no file.

    Git names the folders of submodules and of other working trees, but not their files.
    """
    files: list[str] = []
    left_out: list[str] = []
    for name in names:
        path = pathlib.Path(folder, name)
        if path.is_file():
            files.append(name)
        elif path.is_symlink() or not (path / ".git").exists():
            left_out += [name.rstrip("/")] if os.path.lexists(path) else []
        else:
            inner = await _tree(str(path), await _in_git(str(path)) or ())
            for paths, more in zip((files, left_out), inner, strict=True):
                paths += [os.path.join(name, path) for path in more]
    return files, left_out


def pack(folder: str, names: Iterable[str]) -> bytes:
    """Packs files into a compressed tar archive; follows links."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w:gz", compresslevel=1, dereference=True
    ) as archive:
        for name in names:
            archive.add(os.path.join(folder, name), name, recursive=False)
    return buffer.getvalue()


def unpacker() -> str:
    """Returns a Python script that unpacks an archive of `pack` into its argument."""
    return _UNPACK


def _small(folder: str) -> tuple[list[str], list[str]]:
    """Returns the small files that are not hidden, and the links to folders."""
    files: list[str] = []
    links: list[str] = []
    for root, folders, names in os.walk(folder):
        folders[:] = [n for n in folders if n[0] != "." and n != "__pycache__"]
        paths = [pathlib.Path(root, name) for name in (*folders, *names)]
        links += [os.path.relpath(p, folder) for p in paths if _is_folder_link(p)]
        for path in paths[len(folders) :]:
            small = path.is_file() and path.stat().st_size < MOST_BYTES
            if small and path.name[0] != ".":
                files.append(os.path.relpath(path, folder))
    return files, links


def _is_folder_link(path: pathlib.Path) -> bool:
    return path.is_symlink() and path.is_dir()
