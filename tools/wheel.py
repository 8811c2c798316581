# SPDX-License-Identifier: Apache-2.0
"""Builds sdist and wheel, and tries the wheel in an empty environment: `make wheel`.

Works in temporary folders and environments, so that nothing can be imported from this
repository by accident. Leaves both files in dist/.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile

_ROOT = pathlib.Path(__file__).parents[1]
_IN_WHEEL = ("replicator/py.typed", "replicator/strategy/strategy.proto")
_IN_SDIST = ("LICENSE", "README.md", "setup.cfg", "pyproject.toml")

# A user's first program, in a few lines; the loss has to fall.
_STEP = """
import replicator, tensorflow as tf
assert replicator.__version__ == VERSION, replicator.__version__
assert "site-packages" in replicator.__file__, replicator.__file__
repl = replicator.Replicator(["CPU:0", "CPU:1"])
with repl.context():
    v = tf.Variable([4.0, -2.0])
    optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))
def step_fn():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v**2)
    optimizer.apply_gradients([(tape.gradient(loss, v), v)])
    return repl.all_reduce(loss, "mean")
losses = [float(repl.run(step_fn)[0]) for _ in range(5)]
assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] / 2, losses
print("replicator", replicator.__version__, "trains: loss", losses[0], "to", losses[-1])
"""


def version() -> str:
    """Returns the version, from the only file that defines it."""
    namespace: dict[str, str] = {}
    exec((_ROOT / "replicator" / "version.py").read_text(), namespace)
    return namespace["__version__"]


def missing(names: list[str], expected: tuple[str, ...]) -> list[str]:
    """Returns the expected files that an archive lacks, in any folder."""
    return [e for e in expected if not any(n.endswith(e) for n in names)]


def main() -> int:
    """Builds and tries; returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        temporary = pathlib.Path(folder)
        folder_of_files = _build(temporary)
        sdist, wheel = (
            next(folder_of_files.glob("*.tar.gz")),
            next(folder_of_files.glob("*.whl")),
        )
        with tarfile.open(sdist) as archive:
            lacks = missing(archive.getnames(), _IN_SDIST)
        with zipfile.ZipFile(wheel) as zipped:
            lacks += missing(zipped.namelist(), _IN_WHEEL)
            others = [n for n in zipped.namelist() if not n.startswith("replicator")]
        if lacks or others:
            print(f"missing: {lacks}; not of the library: {others}", file=sys.stderr)
            return 1
        _try(temporary, wheel)
        (_ROOT / "dist").mkdir(exist_ok=True)
        for file in (sdist, wheel):
            shutil.copy(file, _ROOT / "dist")
            print(f"dist/{file.name}")
    return 0


def _build(temporary: pathlib.Path) -> pathlib.Path:
    """Builds both from a copy of the files that git tracks; returns their folder."""
    source, target = temporary / "source", temporary / "built"
    subprocess.run(
        ["git", "clone", "-q", "--depth=1", f"file://{_ROOT}", source], check=True
    )
    python = _environment(temporary / "build")
    _pip(python, "build")
    _run(python, "-m", "build", "--outdir", target, cwd=source)
    return target


def _try(temporary: pathlib.Path, wheel: pathlib.Path) -> None:
    """Installs the wheel into an empty environment, and uses it."""
    python, elsewhere = _environment(temporary / "empty"), temporary / "elsewhere"
    elsewhere.mkdir()
    _pip(python, wheel)
    _run(python, "-m", "pip", "check", cwd=elsewhere)
    _run(python, "-m", "replicator", cwd=elsewhere)
    _run(python, "-c", f"VERSION = {version()!r}\n{_STEP}", cwd=elsewhere)


def _environment(folder: pathlib.Path) -> pathlib.Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def _pip(python: pathlib.Path, *what: object) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    _run(python, "-m", "pip", "install", *quiet, *what)


def _run(*command: object, cwd: pathlib.Path | None = None) -> None:
    environment = {"PATH": "/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "2"}
    arguments = list(map(str, command))
    subprocess.run(arguments, cwd=cwd, check=True, env=_kept() | environment)


def _kept() -> dict[str, str]:
    """Returns the variables that pip and TLS need, without PYTHONPATH."""
    names = (
        "PIP_",
        "HTTP",
        "http",
        "SSL_",
        "REQUESTS_",
        "NO_PROXY",
        "no_proxy",
        "HOME",
    )
    return {k: v for k, v in os.environ.items() if k.startswith(names)}


if __name__ == "__main__":
    sys.exit(main())
