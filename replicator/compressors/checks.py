# SPDX-License-Identifier: Apache-2.0
"""What is refused of the options of compressors."""

from __future__ import annotations

import numbers
from typing import Any

from replicator import arguments, errors


def number(what: str, name: str, value: Any, above: float, most: float) -> None:
    """Raises ArgumentError unless a value is a number in a range.

    Args:
        what: The compressor.
        name: The option.
        value: As the user gave it.
        above: It is larger.
        most: It is not larger.
    """
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not above < value <= most:
        raise bad(what, name, value, f"a number, {above:g} < {name} <= {most:g}")


def whole(what: str, name: str, value: Any, least: int) -> None:
    """Raises ArgumentError unless a value is an int, and not too small."""
    if not arguments.is_whole(value, least):
        raise bad(what, name, value, f"a Python int of at least {least}")


def truth(what: str, name: str, value: Any) -> None:
    """Raises ArgumentError unless a value is True or False."""
    if not isinstance(value, bool):
        raise bad(what, name, value, "True or False")


def bad(what: str, name: str, value: Any, wanted: str) -> errors.ArgumentError:
    """Returns the error for an option that a compressor cannot have."""
    return errors.ArgumentError(
        errors.compose(
            f"the compressor {what} was given {name}={errors.shown(value)}.",
            fix=f"{name} is {wanted}.",
        )
    )
