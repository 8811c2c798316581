# SPDX-License-Identifier: Apache-2.0
"""Reads the flags of the command-line programs from the programs themselves.

A program is a `__main__.py` below replicator/, or a file of examples/ that is run by
its path. Programs with absl flags are imported, and their flags are removed from absl
again, as two of them may use the same name. Independent of Sphinx.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import os
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from absl import flags as absl_flags

import replicator

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"


@dataclasses.dataclass(frozen=True)
class Flag:
    """A command-line flag.

    Attributes:
        name: The name, without dashes.
        takes: The placeholder of its value, or "".
        default: The default; "" if there is none, or the help text states it.
        help: The help text.
    """

    name: str
    takes: str
    default: str
    help: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, `python -m NAME` or `python examples/NAME.py`.

    Attributes:
        name: E.g. "replicator.plan", or "resnet".
        about: The docstring of its module.
        flags: The flags, in the order of their definition.
    """

    name: str
    about: str
    flags: tuple[Flag, ...]

    @property
    def short(self) -> str:
        """The name of its page."""
        return self.name.removeprefix("replicator.")


def names() -> list[str]:
    """Returns the names of all programs of the library."""
    root = pathlib.Path(replicator.__file__).parent
    paths = sorted(root.rglob("__main__.py"))
    return [".".join(path.parent.relative_to(root.parent).parts) for path in paths]


def read(name: str) -> Program:
    """Returns a program with its flags.

    Args:
        name: E.g. "replicator.plan".

    Raises:
        ValueError: It defines flags with neither absl nor argparse.
    """
    main = f"{name}.__main__"
    with _alone(), _imported_anew(main):
        return _read(name, main)


def examples() -> list[str]:
    """Returns the names of all files of examples/."""
    return sorted(path.stem for path in EXAMPLES.glob("*.py"))


def read_example(name: str) -> Program:
    """Returns a program of examples/ with its flags.

    Args:
        name: The name of its file, e.g. "resnet".

    Raises:
        ValueError: It defines flags with neither absl nor argparse.
    """
    with _alone(), _example_importable(name):
        return _read(name, name)


@contextlib.contextmanager
def _example_importable(name: str) -> Iterator[None]:
    """Makes an example importable in this block; what it sets is restored after it."""
    imported = sys.modules.pop(name, None)
    path = [os.fspath(EXAMPLES), *sys.path]
    # The examples set the environment for a TensorFlow of their own.
    with mock.patch.object(sys, "path", path), mock.patch.dict(os.environ):
        try:
            yield
        finally:
            sys.modules.pop(name, None)
            if imported is not None:
                sys.modules[name] = imported


@contextlib.contextmanager
def _imported_anew(main: str) -> Iterator[None]:
    """Makes imports in this block rerun a module; restores the old one afterwards."""
    package = importlib.import_module(main.rpartition(".")[0])
    imported = sys.modules.pop(main, None)
    try:
        yield
    finally:
        if imported is not None:
            sys.modules[main] = imported
            vars(package)["__main__"] = imported


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hides all flags but absl's own in this block, to avoid name clashes."""
    all_flags = absl_flags.FLAGS
    others = [
        (module, flag)
        for module, own in all_flags.flags_by_module_dict().items()
        if not module.startswith("absl.")
        for flag in own
    ]
    all_flags.remove_flag_values({flag.name: flag for _, flag in others})
    try:
        yield
    finally:
        for module, flag in others:
            all_flags[flag.name] = flag
            all_flags.register_flag_by_module(module, flag)


def _read(name: str, main: str) -> Program:
    before = set(absl_flags.FLAGS)
    module = importlib.import_module(main)
    about = inspect.getdoc(module) or ""
    if any(hasattr(module, own) for own in ("absl_flags", "app", "FLAGS")):
        return Program(name, about, _of_absl(main, before))
    parser = _parser(module)
    if parser is None:
        raise ValueError(f"{name} has neither flags of absl nor a parser()")
    return Program(name, about, tuple(_of_argparse(parser)))


def _of_absl(main: str, before: set[str]) -> tuple[Flag, ...]:
    """Returns the flags that a module defined, and restores absl's own."""
    values = _values(main)
    flags = list(values.flags_by_module_dict().get(main, ()))
    if values is absl_flags.FLAGS:  # otherwise the program needs them later
        new_flags = {flag.name: flag for flag in flags if flag.name not in before}
        values.remove_flag_values(new_flags)
    return tuple(
        Flag(flag.name, _takes(flag), _default(flag.default), _help(flag))
        for flag in flags
    )


def _values(main: str) -> Any:
    """Returns absl's flags, or a program's private FlagValues."""
    return getattr(sys.modules[main], "PROGRAM_FLAGS", absl_flags.FLAGS)


def _help(flag: Any) -> str:
    """Returns the help text, without the values of an enum, which _takes returns."""
    return re.sub(r"^<[^>]*>: ", "", flag.help or "")


def _takes(flag: Any) -> str:
    if flag.boolean:
        return ""
    values = getattr(flag, "enum_values", None) or getattr(
        flag.parser, "enum_values", None
    )
    if values:
        return "|".join(values)
    kind = flag.parser.flag_type()
    return {"string": "TEXT", "int": "N", "float": "X"}.get(kind, "A,B,...")


def _default(value: Any) -> str:
    if value is None or value is False or value == "":
        return ""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def _parser(module: Any) -> argparse.ArgumentParser | None:
    """Returns the parser of a program, defined there or in a module that it imports."""
    for place in (module, getattr(module, "flags", None)):
        make = getattr(place, "parser", None)
        if callable(make):
            return make()
    return None


def _of_argparse(parser: argparse.ArgumentParser) -> Sequence[Flag]:
    """Returns the flags of a parser, without --help."""
    result = []
    for action in parser._actions:  # argparse has no public way to list them
        if not action.option_strings or action.dest == "help":
            continue
        takes = ""
        if action.nargs != 0:
            kind = "N" if action.type is int else "TEXT"
            takes = "|".join(action.choices or ()) or str(action.metavar or kind)
        name = action.option_strings[-1].removeprefix("--")
        help_ = (action.help or "") % vars(action)
        # The help states the default.
        result.append(Flag(name, takes, "", help_))
    return result
