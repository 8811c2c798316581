# SPDX-License-Identifier: Apache-2.0
"""Signals that stop a program at a convenient moment."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that stop a run


class Interruption:
    """Notes the first signal to stop, so that the current step is finished and saved.

    A second one stops the program at once. A signal that is ignored, as by nohup, stays
    ignored.

    Attributes:
        signal: The received signal, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for signum in SIGNALS:
            if signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, signum: int, frame: object) -> None:
        self.signal = signum
        self.__exit__()

    def tell(self, write: Callable[[], Any]) -> None:
        """Writes to the terminal; if that is gone, acts as on SIGHUP."""
        try:
            write()
        except OSError:
            self.signal = self.signal or signal.SIGHUP
            for number in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)
