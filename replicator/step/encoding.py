# SPDX-License-Identifier: Apache-2.0
"""Encodes plain Python values for other processes.

Unlike unpickling, decoding runs no code of the sender's: it creates values of the types
listed here, and no others.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np

TYPES = (
    "None, booleans, numbers, strings, bytes, NumPy arrays, and lists, tuples, sets "
    "and dicts of them"
)
_JSON_TYPES = (type(None), bool, int, float, str)  # JSON knows them, also nan and inf
_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
}


class CannotEncode(Exception):
    """Names the type of a value that is none of TYPES."""


def encode(value: Any) -> bytes:
    """Encodes a value.

    Raises:
        CannotEncode: It is none of TYPES, or holds one that is not.
    """
    try:
        return json.dumps(_to_json(value)).encode()
    except RecursionError:
        raise CannotEncode("value that holds itself") from None
    except ValueError:  # Python limits the digits of decimal numbers
        raise CannotEncode("number of thousands of digits") from None


def decode(data: bytes) -> Any:
    """Decodes a value; each call returns a new one.

    Raises:
        ValueError: `encode` did not write the data.
    """
    try:
        return _from_json(json.loads(data))
    except (TypeError, LookupError, RecursionError) as error:
        raise ValueError(f"not an encoded value: {error}") from None


def _to_json(value: Any) -> Any:
    kind = type(value)
    if kind in _JSON_TYPES:
        return value
    if kind is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind.__name__ in _SEQUENCES and kind in (list, tuple, set, frozenset):
        return [kind.__name__, [_to_json(entry) for entry in value]]
    if kind is dict:
        return [
            "dict",
            [[_to_json(key), _to_json(entry)] for key, entry in value.items()],
        ]
    if kind is np.ndarray or isinstance(value, np.generic):
        data = np.ascontiguousarray(value).tobytes()
        shape = list(np.shape(value)) if kind is np.ndarray else None
        return ["array", _name(value.dtype), shape, base64.b64encode(data).decode()]
    raise CannotEncode(kind.__name__)


def _from_json(encoded: Any) -> Any:
    if not isinstance(encoded, list):
        return encoded
    kind, *parts = encoded
    if kind == "bytes":
        return base64.b64decode(parts[0])
    if kind == "complex":
        return complex(*parts)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind]([_from_json(entry) for entry in parts[0]])
    if kind == "dict":
        return {_from_json(key): _from_json(entry) for key, entry in parts[0]}
    if kind == "array":
        name, shape, data = parts
        values = np.frombuffer(base64.b64decode(data), np.dtype(name))  # no objects
        return values[0] if shape is None else values.reshape(shape).copy()
    raise ValueError(f"not an encoded value: {str(kind)[:50]}")


def _name(dtype: np.dtype) -> str:
    """Returns a name that means the same dtype in every process."""
    name = dtype.name if dtype.kind == "V" else dtype.str  # V: also ml_dtypes' bfloat16
    try:
        is_same = np.dtype(name) == dtype
    except TypeError:
        is_same = False
    if dtype.hasobject or not is_same:  # or records
        raise CannotEncode(f"NumPy array of {dtype.name}")
    return name
