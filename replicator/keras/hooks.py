# SPDX-License-Identifier: Apache-2.0
"""Replaces methods of single objects temporarily; classes are never changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Replaces an object's method in this block.

    Args:
        owner: The object.
        name: The method.
        method: The replacement, called without the object.
    """
    attributes = vars(owner)
    previous = attributes.get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if previous is None:
            delattr(owner, name)
        else:
            setattr(owner, name, previous)
