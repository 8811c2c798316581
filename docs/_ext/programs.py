# SPDX-License-Identifier: Apache-2.0
"""The flags of the command-line programs, read from the programs themselves.

A program is a `__main__.py` below replicator/. Those with flags of absl are imported;
what they define is taken out of absl's flags again, as two of them may use one name.
Knows nothing of Sphinx.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import inspect
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from absl import flags as absl_flags

import replicator


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        name: Without dashes.
        takes: What follows it, "" if nothing does.
        default: "" if there is none, or the help says it.
        help: What it does.
    """

    name: str
    takes: str
    default: str
    help: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A program, `python -m NAME`.

    Attributes:
        name: E.g. "replicator.plan".
        about: The docstring of its module.
        flags: In the order in which they are defined.
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
    found = sorted(root.rglob("__main__.py"))
    return [".".join(path.parent.relative_to(root.parent).parts) for path in found]


def read(name: str) -> Program:
    """Returns a program with its flags.

    Args:
        name: E.g. "replicator.plan".

    Raises:
        ValueError: It has flags of neither kind.
    """
    main = f"{name}.__main__"
    with _alone(), _imported_anew(main):
        return _read(name, main)


@contextlib.contextmanager
def _imported_anew(main: str) -> Iterator[None]:
    """In this block an import runs a module once more; after it, all is as before."""
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
    """In this block there are no flags but absl's own: others may have the names."""
    known = absl_flags.FLAGS
    others = [
        (module, flag)
        for module, own in known.flags_by_module_dict().items()
        if not module.startswith("absl.")
        for flag in own
    ]
    known.remove_flag_values({flag.name: flag for _, flag in others})
    try:
        yield
    finally:
        for module, flag in others:
            known[flag.name] = flag
            known.register_flag_by_module(module, flag)


def _read(name: str, main: str) -> Program:
    before = set(absl_flags.FLAGS)
    module = importlib.import_module(main)
    about = inspect.getdoc(module) or ""
    if hasattr(module, "absl_flags") or hasattr(module, "app"):
        return Program(name, about, _of_absl(main, before))
    parser = _parser(module)
    if parser is None:
        raise ValueError(f"{name} has neither flags of absl nor a parser()")
    return Program(name, about, tuple(_of_argparse(parser)))


def _of_absl(main: str, before: set[str]) -> tuple[Flag, ...]:
    """Returns the flags that a module defined; absl's are as they were before."""
    values = _values(main)
    own = list(values.flags_by_module_dict().get(main, ()))
    if values is absl_flags.FLAGS:  # else the program needs them when it runs
        new_flags = {flag.name: flag for flag in own if flag.name not in before}
        values.remove_flag_values(new_flags)
    return tuple(
        Flag(flag.name, _takes(flag), _default(flag.default), flag.help or "")
        for flag in own
    )


def _values(main: str) -> Any:
    """Returns absl's flags, or those that a program keeps apart from a module's."""
    return getattr(sys.modules[main], "OWN", absl_flags.FLAGS)


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
    """Returns the parser of a program, from it or from a module that it imports."""
    for place in (module, getattr(module, "flags", None)):
        make = getattr(place, "parser", None)
        if callable(make):
            return make()
    return None


def _of_argparse(parser: argparse.ArgumentParser) -> Sequence[Flag]:
    """Returns the flags of a parser, without --help."""
    found = []
    for action in parser._actions:  # argparse has no public way to ask
        if not action.option_strings or action.dest == "help":
            continue
        takes = ""
        if action.nargs != 0:
            takes = "|".join(action.choices or ()) or str(action.metavar or "TEXT")
        name = action.option_strings[-1].removeprefix("--")
        found.append(Flag(name, takes, "", action.help or ""))  # which has the default
    return found
