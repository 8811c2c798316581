# SPDX-License-Identifier: Apache-2.0
"""How programs of the library end at what they cannot do: one line, and status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from absl import flags

from replicator import errors


class BadInput(Exception):
    """Ends a program with one line."""


def parse(argv: Sequence[str]) -> list[str]:
    """Returns the arguments that are no flags; ends the program if a flag is bad."""
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(fail(error))


def fail(problem: Exception | str) -> int:
    """Prints what is wrong in one line; returns the exit status."""
    print(errors.one_line(problem), file=sys.stderr)
    return 2
