# SPDX-License-Identifier: Apache-2.0
"""`--sync`: copies the working directory to another host."""

from __future__ import annotations

import asyncio
import io
import os
import pathlib
import tarfile
from collections.abc import Iterable, Iterator

MOST_BYTES = 10 << 20  # per file, outside of git's working trees
_UNPACK = (
    "import os,sys,tarfile;os.makedirs(sys.argv[1],exist_ok=True);"
    "tarfile.open(fileobj=sys.stdin.buffer,mode='r|gz')"
    ".extractall(sys.argv[1],filter='data')"
)


async def choose(folder: str) -> tuple[list[str], str]:
    """Returns the files to copy, as paths in the folder, and a description of them.

    In a working tree of git these are the files that git does not ignore; elsewhere,
    all files below 10 MiB that are not hidden.
    """
    try:
        git = await asyncio.create_subprocess_exec(
            *("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        stdout, _ = await git.communicate()
    except FileNotFoundError:  # no git here
        return _small(folder), "files below 10 MiB"
    if git.returncode != 0:
        return _small(folder), "files below 10 MiB"
    names = sorted({os.fsdecode(name) for name in stdout.split(b"\0") if name})
    files = [name for name in names if pathlib.Path(folder, name).is_file()]
    return files, "files that git does not ignore"


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


def _small(folder: str) -> list[str]:
    return sorted(_walk(folder))


def _walk(folder: str) -> Iterator[str]:
    for root, folders, files in os.walk(folder):
        folders[:] = [n for n in folders if n[0] != "." and n != "__pycache__"]
        for name in files:
            path = pathlib.Path(root, name)
            if name[0] != "." and path.is_file() and path.stat().st_size < MOST_BYTES:
                yield os.path.relpath(path, folder)
