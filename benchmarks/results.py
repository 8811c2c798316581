# SPDX-License-Identifier: Apache-2.0
"""The JSON files through which measuring programs pass results to the report."""

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
    """Returns the machine, versions, time and command of a measurement."""
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
    """Returns the processor's model name, if the system reports it."""
    path = pathlib.Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def write(folder: pathlib.Path, name: str, about: Any, results: Any) -> pathlib.Path:
    """Writes the results of a program; returns the file's path.

    Args:
        folder: The folder of the file; made if absent.
        name: The program's name.
        about: The result of `facts` before the measurement.
        results: All measurements, in seconds and bytes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({**about, "results": results}, indent=2) + "\n")
    return path


def read(folder: pathlib.Path, name: str) -> dict[str, Any] | None:
    """Returns the contents of the program's file, or None if it has not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None
