# SPDX-License-Identifier: Apache-2.0
"""Methods of single objects that are others for a while; classes are never changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """In this block, an object's method is another one.

    Args:
        owner: The object.
        name: Of its method.
        method: What is called in its place, without the object.
    """
    own = vars(owner)
    before = own.get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
