# SPDX-License-Identifier: Apache-2.0
"""Which versions a host has. Sent to other hosts: the standard library only."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json

_PACKAGES = ("replicator", "tensorflow")


def versions() -> dict[str, str | None]:
    """Returns the version of each package that servers need; None: it is missing.

    Nothing is imported, as that takes seconds. The key "path" has the folder of the
    replicator package.
    """
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        found[name] = None if spec is None else _version(name)
    spec = importlib.util.find_spec("replicator")
    places = list(spec.submodule_search_locations or ()) if spec else []
    found["path"] = places[0] if places else None
    return found


def _version(package: str) -> str:
    """Returns the version of whichever distribution a package is of."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # tensorflow-cpu, tf-nightly
        names = importlib.metadata.packages_distributions().get(package, ())
    return importlib.metadata.version(names[0]) if names else "of no known version"


if __name__ == "__main__":
    print(json.dumps(versions()))
