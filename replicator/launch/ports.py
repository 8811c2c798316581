# SPDX-License-Identifier: Apache-2.0
"""Finds a free port of a host.

Sent to other hosts: uses the standard library only.
"""

from __future__ import annotations

import json
import socket


def free_port() -> int:
    """Returns a port that is free on all interfaces."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    print("\n" + json.dumps(free_port()))  # the shell's own files may have begun a line
