# SPDX-License-Identifier: Apache-2.0
"""Checks of users' arguments: one predicate per kind of argument.

A bool does not count as a number, though it is an int in Python. No method of a value
is called before its type is known: it may return anything, or raise.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

LARGEST = 2**31 - 1  # TensorFlow counts with an int32


def is_whole(value: Any, least: int = 0, most: int = LARGEST) -> bool:
    """Whether a value is a Python int in a range, and not a bool."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and least <= value <= most


def is_choice(value: Any, choices: Sequence[str | bool | None]) -> bool:
    """Whether a value is one of a few strings, bools or None."""
    plain = value is None or isinstance(value, str | int | np.bool_)
    return plain and value in choices


def as_whole(value: Any) -> int | None:
    """Converts an integer of any type to an int; returns None for other values."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None  # not a number, or a tensor that has no value yet
    except tf.errors.InvalidArgumentError:
        return None  # a tensor of a dtype that NumPy lacks


def native(value: Any) -> Any:
    """Converts a NumPy array to this machine's byte order; returns other values as is.

    In a graph, TensorFlow would read the bytes of such an array in the native order.
    """
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    return value


def refuses(function: Any, count: int) -> bool:
    """Whether a callable's signature rules out a call with `count` arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False  # some callables written in C have no signature
    try:
        signature.bind(*range(count))
    except TypeError:
        return True
    return False
