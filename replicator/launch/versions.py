# SPDX-License-Identifier: Apache-2.0
"""The package versions of a host.

Sent to other hosts: uses the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json

_PACKAGES = ("replicator", "tensorflow")


def versions() -> dict[str, str | None]:
    """Returns the version of each package that servers need; None if it is missing.

    The packages are not imported, as that takes seconds. The key "path" has the folder
    of the replicator package.
    """
    facts: dict[str, str | None] = {}
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        facts[name] = None if spec is None else _version(name)
    spec = importlib.util.find_spec("replicator")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    facts["path"] = folders[0] if folders else None
    return facts


def _version(package: str) -> str:
    """Returns the version of the distribution that contains a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # tensorflow-cpu, tf-nightly
        names = importlib.metadata.packages_distributions().get(package, ())
    return importlib.metadata.version(names[0]) if names else "of no known version"


if __name__ == "__main__":
    print(json.dumps(versions()))
