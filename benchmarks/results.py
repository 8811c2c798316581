# SPDX-License-Identifier: Apache-2.0
"""The JSON files between the programs that measure and the report."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from typing import Any

_PACKAGES = ("tensorflow", "tensorflow_cpu", "keras", "torch", "jax", "numpy")


def facts() -> dict[str, Any]:
    """Returns what was measured on what, when and how."""
    return {
        "command": ["python", "-m", *sys.orig_argv[2:]],
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": f"{_processor()}, {platform.machine()}, {platform.system()}",
        "cores": cores(),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load": os.getloadavg()[0],
        "versions": {"python": platform.python_version(), **_versions()},
    }


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0))


def _processor() -> str:
    """Returns what the processor calls itself, where the system tells."""
    path = pathlib.Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(folder: pathlib.Path, name: str, about: Any, results: Any) -> pathlib.Path:
    """Writes the results of a program; returns the file's path.

    Args:
        folder: Is made if it is not there.
        name: Of the program.
        about: What `facts` returned before anything was measured.
        results: All that was measured; seconds and bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")
    return path


def read(folder: pathlib.Path, name: str) -> dict[str, Any] | None:
    """Returns what `write` wrote, or None if that program has not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
