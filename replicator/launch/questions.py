# SPDX-License-Identifier: Apache-2.0
"""What the launcher asks a host: a free port, its addresses, its versions.

Sent to other hosts: uses the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import socket
import sys
from collections.abc import Sequence

_ANY_PORT = 9  # nothing is sent there
_PACKAGES = ("replicator", "tensorflow")


def free_port() -> int:
    """Returns a port that is free on all interfaces."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


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


def versions() -> dict[str, str | None]:
    """Returns the version of each package that servers need; None if it is missing.

    The packages are not imported, as that takes seconds. The key "path" has the folder
    of the replicator package.
    """
    facts: dict[str, str | None] = {}
    for name in _PACKAGES:
        facts[name] = _version(name) if _folder(name) else None
    facts["path"] = _folder("replicator")
    if facts["path"] and not os.path.isdir(os.path.join(facts["path"], "serve")):
        facts["replicator"] = facts["path"] = None  # another package of this name
    return facts


def program(folder: str, script: str) -> dict[str, bool]:
    """Returns whether a folder exists, and a script, by its path in the folder."""
    path = os.path.join(folder, script)
    return {"folder": os.path.isdir(folder), "script": os.path.exists(path)}


def _folder(package: str) -> str | None:
    """Returns the folder of a package; None if there is none.

    Any folder of this name is a package to Python, but one without `__init__.py` has no
    origin.
    """
    spec = importlib.util.find_spec(package)
    return None if spec is None or not spec.origin else os.path.dirname(spec.origin)


def _version(package: str) -> str:
    """Returns the version of the distribution that contains a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # tensorflow-cpu, tf-nightly
        names = importlib.metadata.packages_distributions().get(package, ())
    return importlib.metadata.version(names[0]) if names else "of no known version"


def _answer(question: str, *words: str) -> object:
    if question == "port":
        return free_port()
    if question == "sources":
        return sources(words[0], words[1:])
    return {**versions(), **program(*words)}


if __name__ == "__main__":
    # The shell's own files may have begun a line.
    print("\n" + json.dumps(_answer(*sys.argv[1:])))
