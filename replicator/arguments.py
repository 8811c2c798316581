# SPDX-License-Identifier: Apache-2.0
"""Whether what users pass is what it should be: one question per kind of argument.

A bool is no number here, though Python has it so; and nothing is asked of a value by
its own methods before its type is known, which may answer anything, or raise.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

LARGEST = 2**31 - 1  # what TensorFlow counts with an int32


def is_whole(value: Any, least: int = 0, most: int = LARGEST) -> bool:
    """Whether a value is a Python int between two, and no bool."""
    whole = isinstance(value, int) and not isinstance(value, bool)
    return whole and least <= value <= most


def is_choice(value: Any, choices: Sequence[str | bool | None]) -> bool:
    """Whether a value is one of a few texts, truths or None."""
    plain = value is None or isinstance(value, str | int | np.bool_)
    return plain and value in choices


def as_whole(value: Any) -> int | None:
    """Returns a whole number of any type as an int, or None if it is none."""
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, AttributeError, OverflowError):
        return None  # no number, or a tensor that has no value yet
    except tf.errors.InvalidArgumentError:
        return None  # a tensor of a dtype that NumPy lacks


def native(value: Any) -> Any:
    """Returns a NumPy array in this machine's byte order, and other values as they are.

    In a graph, TensorFlow reads the bytes of arrays in another order as if in this one.
    """
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    return value


def refuses(function: Any, count: int) -> bool:
    """Whether a callable cannot be called with so many arguments, as far as it says."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False  # some of those in C do not say
    try:
        signature.bind(*range(count))
    except TypeError:
        return True
    return False
