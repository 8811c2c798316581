# SPDX-License-Identifier: Apache-2.0
"""What a program needs on its host: a free port, and its script.

Sent to other hosts: the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import sys


def free_port() -> int:
    """Returns a port at which nobody listens, by whatever address."""
    with socket.socket() as found:
        found.bind(("", 0))
        return int(found.getsockname()[1])


def look(script: str) -> dict[str, object]:
    """Returns what there is.

    Args:
        script: The path of the script; "": there is none.
    """
    missing = bool(script) and not os.path.exists(script)
    return {"port": free_port(), "missing": missing, "folder": os.getcwd()}


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1])))
