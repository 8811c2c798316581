# SPDX-License-Identifier: Apache-2.0
"""How programs of the library end: at what they cannot do by one line, and status 2."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

from absl import flags

from replicator import errors

_INTERRUPTED = 130  # the status of programs that Ctrl-C ends


class BadInput(Exception):
    """Ends a program with one line."""


def parse(argv: Sequence[str]) -> list[str]:
    """Returns the arguments that are no flags; ends the program if a flag is bad."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(fail(error))


def interruptible(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Returns a program's main function, which Ctrl-C ends with one word."""

    @functools.wraps(main)
    def ended(argv: Sequence[str]) -> int:
        try:
            return main(argv)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return _INTERRUPTED

    return ended


def fail(problem: Exception | str) -> int:
    """Prints what is wrong in one line; returns the exit status."""
    print(errors.one_line(problem), file=sys.stderr)
    return 2
