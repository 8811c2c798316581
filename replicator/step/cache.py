# SPDX-License-Identifier: Apache-2.0
"""Caches by function: which functions are the same, and what is cached for each.

A step continues where it is run with the same functions again: its trace, its inputs
and the variables that step_fn creates are reused. Two functions are the same only if
they are one object: two that look alike (a lambda in a loop, a notebook cell that runs
again) may differ in their closures, in their globals, or in what these will be later.
Methods and partials, which Python creates anew on each access, are the same if their
parts are.

Nothing here keeps a function alive. What belongs to a function goes when the function
does: nobody can ask for it again.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from replicator._tf import autograph

_Item = TypeVar("_Item")
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_BY_VALUE = (bool, int, str, bytes, type(None))


def identity(function: Any) -> tuple[Hashable, list[Any]]:
    """Returns a key that is equal for the same function, and the objects it refers to.

    The key identifies objects by their ids, so it is valid only while they are alive.
    If a part of a partial cannot be weakly referenced (a list, say), the partial itself
    is the key.
    """
    if type(function) is types.FunctionType:
        return id(function), [function]
    if function is None:
        return None, []
    parts: list[Any] = []
    key = _identity(function, parts)
    if all(type(part).__weakrefoffset__ for part in parts):
        return key, parts
    return id(function), [function]


def _identity(value: Any, parts: list[Any]) -> Hashable:
    """Returns a key that is equal for the same value; adds its objects to `parts`."""
    cls = type(value)
    if cls is types.MethodType:
        parts.append(value.__self__)
        return cls, id(value.__self__), _identity(value.__func__, parts)
    if cls in _BOUND:
        parts.append(value.__self__)
        return cls, id(value.__self__), value.__qualname__
    if cls is functools.partial:
        names = tuple(sorted(value.keywords))
        contents = [value.func, *value.args, *(value.keywords[name] for name in names)]
        return cls, names, tuple(_identity(part, parts) for part in contents)
    if cls in _BY_VALUE:
        return cls, value
    if cls is float:
        return cls, value.hex()  # 0.0 == -0.0 and nan != nan, but not as text
    if cls is tuple:
        return cls, tuple(_identity(part, parts) for part in value)
    parts.append(value)
    return id(value)


def plain(value: Any) -> Hashable:
    """Returns a key that is equal for equal numbers and texts, and tuples of them.

    None for all other values.
    """
    parts: list[Any] = []
    key = _identity(value, parts)
    return None if parts else key


class Table(Generic[_Item]):
    """Values by function; each is dropped when its function is freed."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[_Item, list[Any]]] = {}
        self._lock = threading.RLock()

    def get(self, function: Any, make: Callable[[], _Item], *extra: Hashable) -> _Item:
        """Returns the value of a function, creating it if there is none.

        Args:
            function: Any callable, or None.
            make: Returns a value. If the value refers to the function, neither is
                freed.
            *extra: Whatever else distinguishes values.
        """
        function_key, parts = identity(function)
        key = (function_key, extra)
        entry = self._entries.get(key)
        if entry is not None:
            return entry[0]
        with self._lock:
            if key not in self._entries:
                self._entries[key] = make(), self._watched(key, parts)
            return self._entries[key][0]

    def _watched(self, key: Hashable, parts: list[Any]) -> list[Any]:
        """Returns references that drop the entry when one of its parts is freed."""
        entries = self._entries
        return [
            weakref.ref(part, lambda _: entries.pop(key, None))
            if type(part).__weakrefoffset__
            else part
            for part in parts
        ]

    def __len__(self) -> int:
        return len(self._entries)


_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class FunctionCounts:
    """The number of functions that each code object has had, while it is alive."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[types.CodeType, int]
        self._counts = weakref.WeakKeyDictionary()

    def count(self, function: Any) -> int:
        """Counts a function; returns how many there have been of its code.

        This library's own code is not counted: Keras models have one such function
        each.
        """
        code = _code_of(function)
        if code is None or code.co_filename.startswith(_LIBRARY):
            return 0
        self._counts[code] = self._counts.get(code, 0) + 1
        return self._counts[code]


def line_of(function: Any) -> str:
    """Returns the file and line at which the code of a function begins."""
    code = _code_of(function)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _code_of(function: Any) -> types.CodeType | None:
    """Returns the code that the user wrote for a function, if there is any."""
    for _ in range(_WRAPPERS):
        function = autograph.function_of(inspect.unwrap(function))
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif isinstance(function, types.FunctionType):
            return function.__code__
        elif callable(function):
            function = inspect.getattr_static(type(function), "__call__")
        else:
            return None
    return None


_WRAPPERS = 20  # that are followed at most; below them is no function of the user's
