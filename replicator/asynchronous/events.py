# SPDX-License-Identifier: Apache-2.0
"""A log of what each program of asynchronous mode does when: lines of JSON."""

from __future__ import annotations

import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

FOLDER = "REPLICATOR_EVENTS"  # the variable that says where the logs are to be


class Events:
    """The log of one program.

    Args:
        own: Which program this is.
        environment: The variables of this process; without FOLDER nothing is written.
    """

    def __init__(self, own: int, environment: Mapping[str, str] = os.environ) -> None:
        folder = environment.get(FOLDER)
        self._own = own
        self._file = None
        if folder:
            path = pathlib.Path(folder)
            path.mkdir(parents=True, exist_ok=True)
            self._file = (path / f"worker-{own}.jsonl").open("a", buffering=1)

    def note(self, event: str, **facts: Any) -> None:
        """Writes a line.

        Args:
            event: What happens.
            **facts: What is to be known of it.
        """
        if self._file is not None:
            line = {"time": time.time(), "worker": self._own, "event": event, **facts}
            self._file.write(json.dumps(line) + "\n")
