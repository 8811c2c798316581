# SPDX-License-Identifier: Apache-2.0
"""Warnings about deprecated names: since when, until when, and what to use instead.

The policy is in .github/CONTRIBUTING.md: a public name works for two more minor
versions once it warns. tests/test_deprecation.py finds names that are overdue.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ROOT = str(pathlib.Path(__file__).parent)


def warn(what: str, *, since: str, removed_in: str, use: str) -> None:
    """Issues a DeprecationWarning at the user's line.

    Args:
        what: The deprecated name: "Replicator.all_mean".
        since: The version that deprecated it: "0.2".
        removed_in: The first version without it: "0.4".
        use: What to use instead: "Replicator.all_reduce(x, 'mean')".
    """
    warnings.warn(
        f"{what} is deprecated since replicator {since} and will be removed in "
        f"{removed_in}. Use {use}.",
        DeprecationWarning,
        stacklevel=_depth() + 1,
    )


def deprecated(
    *, since: str, removed_in: str, use: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a function or method warn on every call.

    Args:
        since: The version that deprecated it: "0.2".
        removed_in: The first version without it: "0.4".
        use: What to use instead.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = function.__qualname__

        @functools.wraps(function)
        def warning(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            warn(name, since=since, removed_in=removed_in, use=use)
            return function(*args, **kwargs)

        note = f"Deprecated since {since}, removed in {removed_in}: use {use}."
        warning.__doc__ = f"{(function.__doc__ or '').rstrip()}\n\n{note}\n"
        return warning

    return decorate


def _depth() -> int:
    """Returns the number of frames of this library on the stack, from `warn` on."""
    frame, depth = sys._getframe(1), 0
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_ROOT):
        frame, depth = frame.f_back, depth + 1
    return depth
