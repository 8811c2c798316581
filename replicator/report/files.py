# SPDX-License-Identifier: Apache-2.0
"""Prerequisites of tables and pictures: optional packages and output files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from replicator import errors


def check_picture(subject: str, path: str | os.PathLike[str]) -> None:
    """Raises ArgumentError unless a path names a supported picture format.

    Args:
        subject: What is to be plotted: "a plan".
        path: The picture file.
    """
    is_path = isinstance(path, str | os.PathLike)
    suffix = os.path.splitext(os.fspath(path))[1].lower() if is_path else ""
    if suffix not in (".png", ".svg"):
        raise errors.ArgumentError(
            f"{subject} cannot be plotted to {errors.repr_of(path)}: its suffix is "
            f"{suffix!r}.",
            fix="name a file that ends in .png or .svg.",
        )


@contextlib.contextmanager
def writing(problem: str, where: Any) -> Iterator[None]:
    """Turns errors of writing in this block into an ArgumentError.

    Args:
        problem: The start of the message: "a plan cannot be plotted to".
        where: The file.
    """
    try:
        yield
    except (OSError, TypeError, ValueError) as error:
        raise errors.ArgumentError(
            f"{problem} {errors.repr_of(where)}: {errors.summary(error)}.",
            fix="name a file that can be written to, in a folder that exists.",
        ) from error


@contextlib.contextmanager
def needing(package: str, to: str) -> Iterator[None]:
    """Turns a failed import in this block into an error that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise errors.DependencyError(
            f"{package} is needed to {to}, and is not installed.",
            fix=f"pip install {package}, or pip install 'replicator[plan]'.",
        ) from error
