# SPDX-License-Identifier: Apache-2.0
"""The output of a process on a stream, with times."""

from __future__ import annotations

import threading
import time
from typing import IO

from tests.launch.stub import wait_until


class Said:
    """The lines that a process writes to a stream, and their times by time.monotonic().

    Args:
        stream: The stream.

    Attributes:
        lines: The lines so far.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        assert stream is not None
        self.lines: list[tuple[float, str]] = []
        self._stream = stream
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        for line in self._stream:
            self.lines.append((time.monotonic(), line))

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(line for _, line in self.lines)

    def times(self, word: str) -> list[float]:
        """Returns the times of the lines that contain a word."""
        return [when for when, line in self.lines if word in line]

    def at(self, word: str, number: int = 0) -> float:
        """Returns the time of a line that contains a word; waits for it.

        Args:
            word: The word.
            number: Which of these lines, from 0 on.
        """
        result = wait_until(
            lambda: self.times(word)[number:],
            lambda: f"no {word!r} in {self.text}",
        )
        return result[0]

    def finish(self) -> None:
        """Waits until the process has closed the stream."""
        self._reading.join(60)
        assert not self._reading.is_alive()
