# SPDX-License-Identifier: Apache-2.0
"""Shows processes' output, with host names before its lines, and writes it to files."""

from __future__ import annotations

import contextlib
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, Protocol, TextIO

from replicator.launch.hosts import LaunchError

_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan")
_LONGEST = 1 << 16  # bytes per line; longer lines are broken up
_CHUNK = 1 << 16
# TensorFlow's own lines: with a file of C++, from before absl's log is initialized (it
# never is), or with a path in TensorFlow. A program's lines only begin like these.
_INFORMATION = re.compile(
    rb"I0000 00:00:[\d.]+ +\d+ [\w.-]+\.(cc|h|cu|c|cpp):\d+\] "
    rb"|\d{4}-\d\d-\d\d [\d:.]+: I (tensorflow|external|xla)/\S+:\d+\] "
    rb"|WARNING: All log messages before absl::InitializeLog\(\) is called are written "
    rb"to STDERR\s*$"
)


class Reader(Protocol):
    """The reading end of a pipe or a channel."""

    async def read(self, n: int, /) -> bytes:
        """Returns up to n bytes; b"" at the end."""


class Lines:
    r"""Splits a stream of bytes into lines.

    Example:
        >>> from replicator.launch import output
        >>> lines = output.Lines()
        >>> lines.feed(b"one\ntw"), lines.feed(b"o\n"), lines.flush()
        ([b'one'], [b'two'], [])
    """

    def __init__(self) -> None:
        self._incomplete = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the lines that the next bytes complete, without line ends."""
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        pieces = [piece for line in lines for piece in _pieces(line)]
        while len(self._incomplete) >= _LONGEST:
            pieces.append(self._incomplete[:_LONGEST])
            self._incomplete = self._incomplete[_LONGEST:]
        return pieces

    def flush(self) -> list[bytes]:
        """Returns the last line if it has no line end."""
        line, self._incomplete = self._incomplete, b""
        return [line] if line else []


def _pieces(line: bytes) -> list[bytes]:
    cuts = range(0, max(len(line), 1), _LONGEST)
    return [line[start : start + _LONGEST] for start in cuts]


class Output:
    """Shows the output of all processes, and writes it to files.

    Args:
        names: The names of the hosts.
        directory: The directory of the files; None writes no files.
        more: Further names that have files.

    Raises:
        LaunchError: No files can be created in the directory.
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
        """Prints a message of the launcher itself, in one line."""
        _write(sys.stderr, f"replicator.launch: {' '.join(text.split())}\n")

    def line(self, name: str, line: bytes, stream: IO[str]) -> None:
        """Shows a line of a host, and writes it to its file."""
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
        """Writes a line of a host to its file without showing it."""
        self._keep(name, line + b"\n")

    def raw(self, name: str, data: bytes, stream: TextIO) -> None:
        """Passes bytes on unchanged, and writes them to the file."""
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
    """Whether a line is one of TensorFlow's own log messages of level INFO.

    TensorFlow writes many on import, whatever TF_CPP_MIN_LOG_LEVEL says. Lines of
    Python's absl, which users write, are not among them.
    """
    return bool(_INFORMATION.match(line))


async def pump(reader: Reader, take: Callable[[bytes], None]) -> None:
    """Passes all data of a pipe or channel to `take`, until it ends or breaks."""
    with contextlib.suppress(Exception):  # a broken connection is reported elsewhere
        while data := await reader.read(_CHUNK):
            take(data)


def _write(stream: IO[str], text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader may be gone
        encoding = getattr(stream, "encoding", None) or "utf-8"
        stream.write(text.encode(encoding, "replace").decode(encoding))
        stream.flush()


def _console(stream: IO[str]) -> Any:
    """Returns a console that writes in colours; None if the stream is no terminal."""
    if not stream.isatty():
        return None
    try:
        import rich.console
    except ImportError:  # rich is part of the extra "hosts", and optional
        return None
    return rich.console.Console(
        file=stream, highlight=False, markup=False, emoji=False, soft_wrap=True
    )
