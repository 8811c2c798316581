# SPDX-License-Identifier: Apache-2.0
"""Calls the methods that a user's optimizer class overrides, with combined gradients.

Users override `apply_gradients` or `apply` to clip gradients, for example, and may add
arguments. Their methods run once the gradients are combined, as on one device; what
they call in turn must not combine them again.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from replicator import errors

_combined: contextvars.ContextVar[frozenset[int]] = contextvars.ContextVar(
    "_combined", default=frozenset()
)


@contextlib.contextmanager
def with_combined_gradients(optimizer: Any) -> Iterator[None]:
    """Declares that an optimizer's methods receive combined gradients in this block."""
    token = _combined.set(_combined.get() | {id(optimizer)})
    try:
        yield
    finally:
        _combined.reset(token)


def has_combined_gradients(optimizer: Any) -> bool:
    """Whether an optimizer's methods receive gradients that are combined already."""
    return id(optimizer) in _combined.get()


def weight_of(
    method: Callable[..., Any], num_leading: int, args: tuple[Any, ...], options: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Separates the weight of a replica's gradients from the user's arguments.

    Args:
        method: The optimizer's own method, bound.
        num_leading: How many of its parameters the gradients and variables take.
        args: Further positional arguments of the call.
        options: Keyword arguments of the call. `weight` is the replica's weight unless
            the method itself has a parameter of this name. It is never positional:
            what the method does not take may be meant for another class' method.

    Returns:
        The weight or None, and the arguments to pass on.

    Raises:
        TypeError: The method does not take them.
    """
    signature, options, weight = inspect.signature(method), dict(options), None
    if "weight" not in signature.parameters:
        weight = options.pop("weight", None)
    try:
        signature.bind(*[None] * num_leading, *args, **options)
    except TypeError as error:
        name = getattr(method, "__qualname__", "apply")
        raise TypeError(
            errors.compose(
                f"{name}(): {error}.",
                [f"at {errors.user_line()}"],
                "pass the arguments that it takes; a replica's weight in the mean only "
                "by name, as weight=...",
            )
        ) from None
    return weight, args, options


def arguments_by_name(
    method: Callable[..., Any], num_leading: int, args: tuple[Any, ...], options: Any
) -> dict[str, Any]:
    """Returns the arguments of a call of the user's method by their names.

    Args:
        method: As for `weight_of`, which has checked the arguments.
        num_leading: The same.
        args: The same.
        options: The same.
    """
    names = list(inspect.signature(method).parameters)[num_leading:]
    return {**dict(zip(names, args, strict=False)), **options}
