# SPDX-License-Identifier: Apache-2.0
"""Flags and errors of the library's programs, which fail with one line and status 2."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence

from absl import flags

from replicator import errors
from replicator._tf import frames

_TO_MODULE = "--"
_INTERRUPTED = 130  # the exit status of a program that Ctrl-C ends


class BadInput(Exception):
    """Ends a program with its message, in one line."""


def parse(
    argv: Sequence[str], program_flags: flags.FlagValues | None = None
) -> list[str]:
    """Returns the arguments that are not flags; ends the program if a flag is invalid.

    Args:
        argv: All arguments, with the program's name.
        program_flags: The program's flags, if it loads a user's module whose flags may
            have the same names. Everything after "--" is for that module, and is
            returned unchanged.
    """
    try:
        if program_flags is None:
            return flags.FLAGS(argv)
        cut = list(argv).index(_TO_MODULE) if _TO_MODULE in argv else len(argv)
        return [*_parse_separately(argv[:cut], program_flags), *argv[cut:]]
    except flags.UnrecognizedFlagError as error:
        hint = "" if program_flags is None else " (the module's own flags go after --)"
        sys.exit(fail(f"{error}{hint}"))
    except flags.Error as error:
        sys.exit(fail(error))


def _parse_separately(
    argv: Sequence[str], program_flags: flags.FlagValues
) -> list[str]:
    """Parses flags that are registered with absl only for this; --help shows them."""
    for name in program_flags:
        program_flags[name].unparse()
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], program_flags[name])
    flags.FLAGS.append_flag_values(program_flags)
    try:
        return flags.FLAGS(argv)
    finally:
        flags.FLAGS.remove_flag_values(program_flags)
        program_flags.mark_as_parsed()


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns a program's arguments, and those for the module that it loads."""
    cut = list(argv).index(_TO_MODULE) if _TO_MODULE in argv else len(argv)
    return list(argv[1:cut]), list(argv[cut + 1 :])


def parse_of_module(name: str, arguments: Sequence[str]) -> None:
    """Parses the flags that a user's module has defined with absl.

    Args:
        name: The module.
        arguments: All arguments for it. Unknown flags are an error, unless no module of
            the user's defines any flag: it then parses them in another way.

    Raises:
        flags.Error: A flag is invalid.
    """
    defined = flags.FLAGS.flags_by_module_dict()
    users = any(names and _is_users(module) for module, names in defined.items())
    flags.FLAGS([name, *arguments], known_only=not users)


def _is_users(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return bool(
        file and frames.users_of([(file, 1, "")]) and not frames.is_installed(file)
    )


def check_outputs(*output_flags: flags.FlagHolder[str | None]) -> None:
    """Checks that output files can be written, before the work that they describe.

    Args:
        output_flags: Flags whose values are file names, or None for no file. An
            existing file stays as it is, and no new one is left.

    Raises:
        BadInput: A file cannot be written, or two are the same.
    """
    flags_by_path: dict[str, str] = {}
    for flag in output_flags:
        if flag.value is None:
            continue
        name = flags_by_path.setdefault(os.path.abspath(flag.value), flag.name)
        if name != flag.name:
            raise BadInput(f"--{name} and --{flag.name} name the same file")
        try:
            _try_to_write(flag.value)
        except (OSError, ValueError) as error:
            raise BadInput(f"--{flag.name}: {errors.summary(error)}") from None


def _try_to_write(path: str) -> None:
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        return  # a pipe, for example: opening one blocks until its other end opens
    existed = os.path.lexists(path)
    with open(path, "a"):
        pass
    if not existed:
        os.unlink(path)


def interruptible(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Wraps a program's main function so that Ctrl-C ends it with one word."""

    @functools.wraps(main)
    def ended(argv: Sequence[str]) -> int:
        try:
            return main(argv)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return _INTERRUPTED

    return ended


def fail(problem: Exception | str) -> int:
    """Prints a problem in one line; returns the exit status."""
    print(errors.one_line(problem), file=sys.stderr)
    return 2
