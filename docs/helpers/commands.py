# SPDX-License-Identifier: Apache-2.0
"""Commands that a page shows as they are typed, with what they really print."""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import sys

from IPython.display import HTML

from docs.helpers import wide

_ROOT = pathlib.Path(__file__).parents[2]
_COLORS = ("FORCE_COLOR", "CLICOLOR_FORCE")


def run(command: str) -> HTML:
    """Runs a command in the current folder; returns what it printed.

    Args:
        command: A line for a shell, without variables or pipes. `python` is the one
            that builds the page, and `examples/NAME.py` is that of this repository.

    Returns:
        The command and its standard output, in a box that scrolls sideways. Progress
        bars go to standard error, and are left out.

    Raises:
        RuntimeError: It fails.
    """
    words = [_resolved(word) for word in shlex.split(command)]
    # Kernels ask for colors, which a page cannot show.
    environment = {k: v for k, v in os.environ.items() if k not in _COLORS}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{command} ended with {ended.returncode}: {ended.stderr}")
    return wide.wide(f"$ {command}\n{ended.stdout.rstrip()}")


def _resolved(word: str) -> str:
    if word == "python":
        return sys.executable
    return str(_ROOT / word) if word.startswith("examples/") else word
