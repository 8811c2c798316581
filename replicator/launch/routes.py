# SPDX-License-Identifier: Apache-2.0
"""Finds the addresses from which a host connects to the others.

Sent to other hosts: uses the standard library only.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence

_ANY_PORT = 9  # nothing is sent there


def sources(local_address: str, other_addresses: Sequence[str]) -> list[str] | None:
    """Returns the addresses from which this host connects to others.

    Args:
        local_address: The IP address by which the others reach this host.
        other_addresses: The IP addresses by which this host reaches the others.

    Returns:
        The addresses; None if the others may see different ones: if `local_address`, or
        the way to one of them, is translated.
    """
    addresses = {local_address}
    try:
        for address in (local_address, *other_addresses):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                if address == local_address:
                    probe.bind((local_address, 0))  # only possible if it is this host's
                probe.connect((address, _ANY_PORT))
                addresses.add(str(probe.getsockname()[0]))
    except OSError:
        return None
    return sorted(addresses)


if __name__ == "__main__":
    print(json.dumps(sources(sys.argv[1], sys.argv[2:])))
