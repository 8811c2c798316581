# SPDX-License-Identifier: Apache-2.0
"""What processes write: lines with a host's name before them, and files."""

from __future__ import annotations

import contextlib
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol, TextIO

from replicator.launch.hosts import LaunchError

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan")
_LONGEST = 1 << 16  # bytes of a line; what is longer is broken
_CHUNK = 1 << 16
_INFORMATION = re.compile(
    rb"I\d{4} \d|\d{4}-\d\d-\d\d \S+: I |WARNING: All log messages before absl::"
)


class Reader(Protocol):
    """The reading end of a pipe or a channel."""

    async def read(self, n: int, /) -> bytes:
        """Returns up to n bytes; none at the end."""


class Lines:
    r"""Makes lines of pieces of bytes.

    Example:
        >>> from replicator.launch import output
        >>> lines = output.Lines()
        >>> lines.feed(b"one\ntw"), lines.feed(b"o\n"), lines.rest()
        ([b'one'], [b'two'], [])
    """

    def __init__(self) -> None:
        self._left = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that end in what comes next, without their ends."""
        *lines, self._left = (self._left + data).split(b"\n")
        broken = [piece for line in lines for piece in _pieces(line)]
        while len(self._left) >= _LONGEST:
            broken.append(self._left[:_LONGEST])
            self._left = self._left[_LONGEST:]
        return broken

    def rest(self) -> list[bytes]:
        """Returns a last line that nothing ends."""
        left, self._left = self._left, b""
        return [left] if left else []


def _pieces(line: bytes) -> list[bytes]:
    cuts = range(0, max(len(line), 1), _LONGEST)
    return [line[start : start + _LONGEST] for start in cuts]


class Output:
    """Shows what all processes write, and keeps it in files.

    Args:
        names: Those of the hosts.
        directory: Where the files go; None: nowhere.
        more: Names of what has a file, too.

    Raises:
        LaunchError: There can be no files in the directory.
    """

    def __init__(
        self, names: list[str], directory: str | None, more: Sequence[str] = ()
    ) -> None:
        self._styles = {n: _STYLES[k % len(_STYLES)] for k, n in enumerate(names)}
        self._width = max(map(len, names), default=0)
        self._directory = directory and pathlib.Path(directory)
        self._files: dict[str, IO[bytes]] = {}
        self._consoles = {id(s): _console(s) for s in (sys.stdout, sys.stderr)}
        if self._directory:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                for name in (*names, *more):
                    self._file(name)
            except OSError as error:
                text = f"--output-dir: {error.filename or directory}: {error.strerror}"
                raise LaunchError(text) from error

    def say(self, text: str) -> None:
        """Says something of the launcher itself, in one line."""
        _write(sys.stderr, f"replicator.launch: {' '.join(text.split())}\n")

    def line(self, name: str, line: bytes, stream: IO[str]) -> None:
        """Shows a line of a host."""
        self.keep(name, line)
        prefix = f"[{name}]".ljust(self._width + 2) + " "
        console = self._consoles.get(id(stream))
        text = line.decode(errors="replace") + "\n"
        if console is None:
            _write(stream, prefix + text)
        else:
            with contextlib.suppress(OSError):
                console.print(prefix, style=self._styles.get(name), end="")
            _write(stream, text)

    def keep(self, name: str, line: bytes) -> None:
        """Keeps a line of a host in its file, and does not show it."""
        self._keep(name, line + b"\n")

    def raw(self, name: str, data: bytes, stream: TextIO) -> None:
        """Passes bytes on as they are."""
        self._keep(name, data)
        with contextlib.suppress(OSError, ValueError):
            stream.buffer.write(data)
            stream.flush()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _keep(self, name: str, data: bytes) -> None:
        if self._directory:
            with contextlib.suppress(OSError):  # a full disk does not end the program
                self._file(name).write(data)

    def _file(self, name: str) -> IO[bytes]:
        if name not in self._files:
            assert self._directory
            path = self._directory / f"{name.replace('/', '_')}.log"
            self._files[name] = path.open("wb", buffering=0)
        return self._files[name]


def is_information(line: bytes) -> bool:
    """Returns whether a line is one of those in which TensorFlow tells what it does.

    It writes many while it is imported, whatever TF_CPP_MIN_LOG_LEVEL says.
    """
    return bool(_INFORMATION.match(line))


async def pump(reader: Reader, take: Callable[[bytes], None]) -> None:
    """Hands over all that a pipe or a channel brings, until it ends or breaks."""
    with contextlib.suppress(Exception):  # a broken connection is told of elsewhere
        while data := await reader.read(_CHUNK):
            take(data)


def _write(stream: IO[str], text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever reads it may have gone
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()


def _console(stream: IO[str]) -> Any:
    """Returns what writes in colours; None where that is no terminal."""
    if not stream.isatty():
        return None
    try:
        import rich.console
    except ImportError:  # of the extra "hosts": without it there are no colours
        return None
    return rich.console.Console(
        file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True
    )
