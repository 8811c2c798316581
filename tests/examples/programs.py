# SPDX-License-Identifier: Apache-2.0
"""Runs the examples in separate processes."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

from absl import flags

from tests import forks

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = {
    **{k: v for k, v in os.environ.items() if not k.startswith("COVERAGE_")},
    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    "PYTHONUNBUFFERED": "1",  # lines are read as they are printed
}


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a program.

    Attributes:
        status: Its exit status.
        stdout: Its standard output.
        stderr: Its standard error.
    """

    status: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    """Makes the examples' support package importable in this block."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield
    finally:
        sys.path.remove(str(EXAMPLES))


@contextlib.contextmanager
def _without_flags_of_others() -> Iterator[None]:
    """Limits flags in this block to absl's own, and those that the block defines."""
    values = flags.FLAGS

    def defined() -> list[str]:
        return [n for n in values if not is_absls(values.find_module_defining_flag(n))]

    others = {n: (values[n], values.find_module_defining_flag(n)) for n in defined()}
    for name in others:
        delattr(values, name)
    try:
        yield
    finally:
        for name in defined():
            delattr(values, name)
        for name, (flag, module) in others.items():
            values[name] = flag
            values.register_flag_by_module(module, flag)


def is_absls(module: Any) -> bool:
    return str(module).startswith("absl")


def support() -> types.ModuleType:
    """Returns the examples' support package."""
    with _importable():
        return importlib.import_module("support")


def load(name: str) -> types.ModuleType:
    """Returns an example as a module, without keeping its flags."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _importable(), _without_flags_of_others():
        sys.modules[name] = module  # its dataclasses look it up
        try:
            spec.loader.exec_module(module)
        finally:
            del sys.modules[name]
    return module


def call(name: str, *given: str) -> Ended:
    """Runs an example to its end, in a process that has imported TensorFlow."""
    command = [EXAMPLES / f"{name}.py", *given]
    result = forks.run(command, ENVIRONMENT, timeout=1200)
    return Ended(result.returncode, result.stdout, result.stderr)


def call_well(name: str, *given: str) -> str:
    """Runs an example as `call` does, which must succeed; returns its output."""
    ended = call(name, *given)
    assert ended.status == 0, ended.stderr
    return ended.stdout


def run(name: str, *given: str, path: pathlib.Path | None = None) -> Ended:
    """Runs an example to its end as a user does, in a new interpreter.

    Args:
        name: The example's name.
        given: Its flags.
        path: A folder of modules that come before others of their names.
    """
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *given]
    result = subprocess.run(
        command,
        env=ENVIRONMENT if path is None else {**ENVIRONMENT, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        timeout=1200,
        preexec_fn=as_in_a_terminal,
    )
    return Ended(result.returncode, result.stdout, result.stderr)


def interrupt(name: str, after: str, *given: str, signum: int = signal.SIGINT) -> str:
    """Runs an example until it prints a text, then sends a signal.

    Returns:
        Its further output; its status must be that of the signal.
    """
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *given]
    with subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=as_in_a_terminal,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if after in line:
                process.send_signal(signum)
                break
        printed = process.stdout.read()
    assert process.returncode == 128 + signum
    return printed


def as_in_a_terminal() -> None:
    """Makes signals stop a program, which nohup and background shells prevent."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)


def assert_refused(ended: Ended, name: str, said: str, status: int = 2) -> None:
    """Asserts that a program ended with one line that contains a text."""
    assert ended.status == status
    (line,) = forks.own_lines(ended.stderr)
    assert line.startswith(f"{name}.py: error: ")
    assert said in line
    assert "Traceback" not in ended.stderr + ended.stdout


def history(folder: pathlib.Path) -> dict[str, Any]:
    """Returns a run's logged numbers."""
    return json.loads((folder / "history.json").read_text())
