# SPDX-License-Identifier: Apache-2.0
"""Checks what a program needs on its host: a free port, and its script.

Sent to other hosts: uses the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def free_port() -> int:
    """Returns a port that is free on all interfaces."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def look(script: str) -> dict[str, object]:
    """Returns a free port, whether the script is missing, and the working directory.

    Args:
        script: The path of the script, or "" for none.
    """
    missing = bool(script) and not os.path.exists(script)
    return {"port": free_port(), "missing": missing, "folder": os.getcwd()}


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1])))
