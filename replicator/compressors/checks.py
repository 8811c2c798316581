# SPDX-License-Identifier: Apache-2.0
"""Checks of the options of compressors."""

from __future__ import annotations

import numbers
from typing import Any

from replicator import arguments, errors


def number(what: str, name: str, value: Any, above: float, most: float) -> None:
    """Raises ArgumentError unless a value is a number in a range.

    Args:
        what: The compressor.
        name: The option.
        value: The user's argument.
        above: The exclusive lower bound.
        most: The inclusive upper bound.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not above < value <= most:
        raise bad(what, name, value, f"a number, {above:g} < {name} <= {most:g}")


def whole(what: str, name: str, value: Any, least: int) -> None:
    """Raises ArgumentError unless a value is an int of at least `least`."""
    if not arguments.is_whole(value, least):
        raise bad(what, name, value, f"a Python int of at least {least}")


def truth(what: str, name: str, value: Any) -> None:
    """Raises ArgumentError unless a value is True or False."""
    if not isinstance(value, bool):
        raise bad(what, name, value, "True or False")


def bad(what: str, name: str, value: Any, expected: str) -> errors.ArgumentError:
    """Returns the error for an invalid option of a compressor."""
    return errors.ArgumentError(
        f"the compressor {what} was given {name}={errors.repr_of(value)}.",
        fix=f"{name} is {expected}.",
    )
