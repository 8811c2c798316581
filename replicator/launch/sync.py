# SPDX-License-Identifier: Apache-2.0
"""`--sync`: copies the working directory to another host."""

from __future__ import annotations

import asyncio
import io
import os
import pathlib
import tarfile
from collections.abc import Iterable, Iterator

MOST_BYTES = 10 << 20  # of a file that git does not know
_UNPACK = (
    "import os,sys,tarfile;os.makedirs(sys.argv[1],exist_ok=True);"
    "tarfile.open(fileobj=sys.stdin.buffer,mode='r|gz')"
    ".extractall(sys.argv[1],filter='data')"
)


async def choose(folder: str) -> tuple[list[str], str]:
    """Returns the files to copy, by their paths in the folder, and which those are.

    In a working tree of git they are those that it does not ignore; elsewhere all below
    10 MiB that are not hidden.
    """
    try:
        git = await asyncio.create_subprocess_exec(
            *("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
            cwd=folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        listed, _ = await git.communicate()
    except FileNotFoundError:  # no git here
        return _small(folder), "files below 10 MiB"
    if git.returncode != 0:
        return _small(folder), "files below 10 MiB"
    names = sorted({os.fsdecode(name) for name in listed.split(b"\0") if name})
    kept = [name for name in names if pathlib.Path(folder, name).is_file()]
    return kept, "files that git does not ignore"


def pack(folder: str, names: Iterable[str]) -> bytes:
    """Returns files as a compressed tar archive, in which no file is a link."""
    packed = io.BytesIO()
    with tarfile.open(
        fileobj=packed, mode="w:gz", compresslevel=1, dereference=True
    ) as archive:
        for name in names:
            archive.add(os.path.join(folder, name), name, recursive=False)
    return packed.getvalue()


def unpacker() -> str:
    """Returns the Python script that unpacks what `pack` packed, into its argument."""
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
