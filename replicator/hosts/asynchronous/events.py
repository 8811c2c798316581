# SPDX-License-Identifier: Apache-2.0
"""Logs the events of each program of asynchronous mode, as lines of JSON."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

FOLDER = "REPLICATOR_EVENTS"  # the environment variable with the folder of the logs


class Events:
    """The log of one program.

    Args:
        program: The number of this program.
        environment: The environment variables; without FOLDER, nothing is written.
    """

    def __init__(
        self, program: int, environment: Mapping[str, str] = os.environ
    ) -> None:
        folder = environment.get(FOLDER)
        self._program = program
        self._file = None
        if folder:
            path = pathlib.Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / f"worker-{program}.jsonl").open("a", buffering=1)

    def note(self, event: str, **facts: Any) -> None:
        """Writes a line.

        Args:
            event: The name of the event.
            **facts: Further fields of the line.
        """
        if self._file is not None:
            line = {"time": time.time(), "worker": self._program, "event": event}
            line |= facts
            self._file.write(json.dumps(line) + "\n")
