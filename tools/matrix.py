# SPDX-License-Identifier: Apache-2.0
"""Tests on each Python and both ends of the TensorFlow range: `make test-matrix`.

Each pair has its own environment in .venv-matrix/. A missing Python is skipped and
reported by name, so nothing untested counts as tested. `--only=3.12-2.21` runs one
pair; arguments after `--` replace the usual arguments of pytest.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TENSORFLOWS = ("2.18", "2.21")
# TensorFlow has no wheels for some: it supports 3.13 since 2.20.
NO_WHEELS = {("3.13", "2.18"): "TensorFlow 2.18 has no wheels for Python 3.13"}
_TESTS = ("-m", "not slow", "--numprocesses=auto", "--dist=worksteal")


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one pair.

    Attributes:
        name: "3.11-2.18".
        status: "passed", "failed" or "not run".
        why: The last line of pytest's output, or why nothing was run.
    """

    name: str
    status: str
    why: str


def python(version: str) -> str | None:
    """Returns the interpreter of a version, from PATH or pyenv, or None."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    places = sorted(pyenv.glob(f"versions/{version}*/bin/python{version}"))
    candidates = [str(p) for p in places] + [shutil.which(f"python{version}") or ""]
    for name in candidates:
        if name and _says(name) == version:
            return name
    return None


def _says(name: str) -> str:
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    process = subprocess.run([name, "-c", code], capture_output=True, text=True)
    return process.stdout.strip()


def run(version: str, tensorflow: str, tests: Sequence[str]) -> Result:
    """Runs the tests of one pair in its environment, creating that if necessary."""
    name = f"{version}-{tensorflow}"
    if (version, tensorflow) in NO_WHEELS:
        return Result(name, "not run", NO_WHEELS[version, tensorflow])
    interpreter = python(version)
    if interpreter is None:
        return Result(name, "not run", f"no Python {version} was found")
    folder = ROOT / ".venv-matrix" / name
    own, installed = folder / "bin" / "python", folder / ".installed"
    if not installed.exists():
        steps: list[list[object]] = [
            [interpreter, "-m", "venv", folder],
            [
                *(own, "-m", "pip", "install", "--quiet"),
                *(".[test]", f"tensorflow == {tensorflow}.*"),
                f"tf_keras == {tensorflow}.*",
            ],
            [own, "-m", "pip", "uninstall", "--quiet", "--yes", "replicator"],
        ]
        for step in steps:
            if subprocess.run(list(map(str, step)), cwd=ROOT, check=False).returncode:
                return Result(name, "failed", "it could not be installed")
        installed.touch()
    # The package is that of the repository, as it is now.
    process = subprocess.run(
        [str(own), "-m", "pytest", *(tests or _TESTS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(process.stdout, end="", flush=True)
    last = (process.stdout.strip().splitlines() or ["nothing was printed"])[-1]
    status = "failed" if process.returncode else "passed"
    return Result(name, status, last.strip("= "))


def table(results: Sequence[Result]) -> str:
    """Returns the outcomes of all pairs, one line each."""
    head = f"{'Python':8}{'TensorFlow':12}{'':9}"
    lines = [head.rstrip()]
    for result in results:
        version, _, tensorflow = result.name.partition("-")
        lines.append(f"{version:8}{tensorflow:12}{result.status:9}{result.why}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Runs all pairs, or one; returns the exit status: 1 if any failed or none ran."""
    versions, _, tests = _split(argv)
    names = [f"{p}-{t}" for p in PYTHONS for t in TENSORFLOWS]
    only = [a.removeprefix("--only=") for a in versions if a.startswith("--only=")]
    if len(only) != len(versions) or any(name not in names for name in only):
        print(
            f"usage: tools/matrix.py [--only=NAME] [-- ...]; {names}", file=sys.stderr
        )
        return 2
    pairs = [name.split("-") for name in names if not only or name in only]
    results = [run(version, tensorflow, tests) for version, tensorflow in pairs]
    print("\n" + table(results))
    statuses = {result.status for result in results}
    return int("failed" in statuses or "passed" not in statuses)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Returns the arguments before and after --."""
    arguments = list(argv)
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:at], arguments[at : at + 1], arguments[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
