# SPDX-License-Identifier: Apache-2.0
"""The signals that end the launcher."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Receives signals inside a `caught` block.

    Attributes:
        first: The first signal received, or None.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._next: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def next(self) -> asyncio.Future[int]:
        """Returns a future of the next signal."""
        return self._next

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Receives signals, except ignored ones, such as SIGHUP under nohup."""
        loop = asyncio.get_running_loop()
        numbers = [n for n in _CAUGHT if signal.getsignal(n) is not signal.SIG_IGN]
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self.first is None:
            self.first = number
        future, self._next = self._next, asyncio.get_running_loop().create_future()
        future.set_result(number)
