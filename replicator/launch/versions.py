# SPDX-License-Identifier: Apache-2.0
"""The package versions of a host, and whether it has the program.

Sent to other hosts: uses the standard library only.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys

_PACKAGES = ("replicator", "tensorflow")


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


if __name__ == "__main__":
    # The shell's own files may have begun a line.
    print("\n" + json.dumps({**versions(), **program(*sys.argv[1:])}))
