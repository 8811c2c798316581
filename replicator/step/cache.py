# SPDX-License-Identifier: Apache-2.0
"""Which functions are the same, and what a Replicator keeps for those that are there.

A step goes on where it is run with the same functions again: its trace, its inputs, the
variables that step_fn makes. Two functions are the same only if they are one object:
two that look alike (a lambda in a loop, a notebook's cell that runs again) may differ
in what they have closed over, in their globals, or in what those will be tomorrow.
Methods and partials, which Python makes anew at each look, are the same if their parts
are.

Nothing here keeps a function. What belongs to one goes when the function does: nobody
can ask for it again.
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

from replicator import _tf

_Kept = TypeVar("_Kept")
_BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_BY_VALUE = (bool, int, str, bytes, type(None))


def identity(function: Any) -> tuple[Hashable, list[Any]]:
    """Returns what is equal for the same function, and the objects that it is about.

    It tells objects by their ids, and so is only good as long as they are there. Where
    parts of a partial cannot be watched (a list, say), the partial itself is taken.
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
    """Returns what is equal for the same value; adds the objects in it to `parts`."""
    cls = type(value)
    if cls is types.MethodType:
        parts.append(value.__self__)
        return cls, id(value.__self__), _identity(value.__func__, parts)
    if cls in _BOUND:
        parts.append(value.__self__)
        return cls, id(value.__self__), value.__qualname__
    if cls is functools.partial:
        named = tuple(sorted(value.keywords))
        inside = [value.func, *value.args, *(value.keywords[name] for name in named)]
        return cls, named, tuple(_identity(part, parts) for part in inside)
    if cls in _BY_VALUE:
        return cls, value
    if cls is float:
        return cls, value.hex()  # 0.0 == -0.0, and nan is no nan
    if cls is tuple:
        return cls, tuple(_identity(part, parts) for part in value)
    parts.append(value)
    return id(value)


class Table(Generic[_Kept]):
    """Values for functions; each is forgotten when its function is no more."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, tuple[_Kept, list[Any]]] = {}
        self._lock = threading.RLock()

    def get(self, function: Any, make: Callable[[], _Kept], *others: Hashable) -> _Kept:
        """Returns the value of a function, which is made if there is none.

        Args:
            function: Any callable, or None.
            make: Returns a value. Where that holds the function, both stay.
            *others: What else tells values apart.
        """
        same, parts = identity(function)
        key = (same, others)
        entry = self._entries.get(key)
        if entry is not None:
            return entry[0]
        with self._lock:
            if key not in self._entries:
                self._entries[key] = make(), self._watched(key, parts)
            return self._entries[key][0]

    def _watched(self, key: Hashable, parts: list[Any]) -> list[Any]:
        """Returns what forgets an entry when the first of its parts goes."""
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


class Counts:
    """How many functions there were of each piece of code, as long as that is there."""

    def __init__(self) -> None:
        self._counts: weakref.WeakKeyDictionary[types.CodeType, int]
        self._counts = weakref.WeakKeyDictionary()

    def count(self, function: Any) -> int:
        """Returns how many functions of this one's code there were, with this one.

        None of this library's own: those of Keras models are as many as these.
        """
        code = _code_of(function)
        if code is None or code.co_filename.startswith(_LIBRARY):
            return 0
        self._counts[code] = self._counts.get(code, 0) + 1
        return self._counts[code]


def line_of(function: Any) -> str:
    """Returns the line where the code of a function begins."""
    code = _code_of(function)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _code_of(function: Any) -> types.CodeType | None:
    """Returns the code that the user wrote of a function, if it has any."""
    for _ in range(_WRAPPERS):
        function = _tf.function_of(inspect.unwrap(function))
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


_WRAPPERS = 20  # around a function, at most; more is no function of the user's
