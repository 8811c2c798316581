# SPDX-License-Identifier: Apache-2.0
"""The signals that call everything off."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

_CAUGHT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """Signals that come while it is entered (`caught`).

    Attributes:
        first: The first one, or None.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._next: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def next(self) -> asyncio.Future[int]:
        """Returns what is done when one comes that has not come yet."""
        return self._next

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Has signals come here, but for those that are ignored, as nohup has it."""
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
        came, self._next = self._next, asyncio.get_running_loop().create_future()
        came.set_result(number)
