# SPDX-License-Identifier: Apache-2.0
"""Compares and copies the Python functions inside a graph.

tf.py_function and tf.numpy_function register a function under a token, which their op
names. step_fn creates such functions anew for each replica, under different tokens.
They are alike if they have the same code and refer to the same objects, or to equal
numbers and strings. A copy refers to what replica 1's function refers to, but has cells
of its own: what one replica's function assigns stays with that replica, as it does
where step_fn is called.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from replicator import _tf

OPS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")  # whose token names a function
# Immutable types: equal values are as good as identical ones.
_VALUES = (bool, int, float, complex, str, bytes, type(None), tf.DType, tf.TypeSpec)


class Pairs:
    """Finds which functions of replicas 0 and 1 are alike.

    Attributes:
        tokens: The tokens of replica 0's functions, by those of replica 1's.
    """

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}
        self._cells: dict[int, Any] = {}  # by id: the other replica's cell
        self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}

    def difference(self, one: str, two: str) -> str:
        """Describes how the functions under two tokens differ, or returns ""."""
        if self.tokens.get(two) == one:
            return ""
        functions = _tf.python_function(one), _tf.python_function(two)
        if functions[0] is None or functions[1] is None:
            return "unknown Python functions"
        if functions[0].facts != functions[1].facts:
            return "Python functions with different results"
        self.tokens[two] = one
        return self._unlike(functions[0].body, functions[1].body)

    def _unlike(self, one: Any, two: Any, name: str = "") -> str:
        """Describes how two objects that functions refer to differ, or returns ""."""
        if one is two or (id(one), id(two)) in self._seen:
            return ""
        if type(one) is not type(two):
            return _differs(name)
        if isinstance(one, _VALUES):
            return self._unequal(one, two, name)
        self._seen[id(one), id(two)] = one, two
        if isinstance(one, tuple):
            if len(one) != len(two):
                return _differs(name)
            return self._first(zip(one, two, strict=True), name)
        if isinstance(one, types.FunctionType):
            return self._unlike_functions(one, two)
        if isinstance(one, types.MethodType):
            return self._first(
                [(one.__func__, two.__func__), (one.__self__, two.__self__)], name
            )
        if isinstance(one, functools.partial):
            keywords = tuple(sorted(one.keywords)), tuple(sorted(two.keywords))
            return self._first(
                [
                    (one.func, two.func),
                    (one.args, two.args),
                    keywords,
                    *((one.keywords[k], two.keywords.get(k)) for k in keywords[0]),
                ],
                name,
            )
        if _tf.same_conversion(one, two):
            return ""
        return _differs(name)

    def _unequal(self, one: Any, two: Any, name: str) -> str:
        if one == two and repr(one) == repr(two):  # 0.0 is not -0.0
            return ""
        tokens = [
            str(x, "ascii", "replace") if isinstance(x, bytes) else x
            for x in (one, two)
        ]
        if all(isinstance(x, str) and _tf.python_function(x) for x in tokens):
            # A gradient function refers to the function that it differentiates.
            return self.difference(*tokens)
        return _differs(name)

    def _first(self, pairs: Iterable[tuple[Any, Any]], name: str) -> str:
        for first, second in pairs:
            difference = self._unlike(first, second, name)
            if difference:
                return difference
        return ""

    def _unlike_functions(
        self, one: types.FunctionType, two: types.FunctionType
    ) -> str:
        if one.__code__ is not two.__code__ or one.__globals__ is not two.__globals__:
            return "not the same Python function"
        difference = self._first(
            [
                (one.__defaults__, two.__defaults__),
                (_items(one.__kwdefaults__), _items(two.__kwdefaults__)),
                (_items(_attributes(one)), _items(_attributes(two))),
            ],
            "argument default",
        )
        if difference:
            return difference
        cells = zip(one.__closure__ or (), two.__closure__ or (), strict=True)
        for name, (first, second) in zip(one.__code__.co_freevars, cells, strict=True):
            if first is second:
                continue
            ways = (first, second), (second, first)
            if any(self._cells.setdefault(id(a), b) is not b for a, b in ways):
                return _differs(name)
            difference = self._unlike(_content(first), _content(second), name)
            if difference:
                return difference
        return ""


class Copies:
    """Copies one further replica's functions, each once.

    Args:
        tokens: The tokens of replica 0's functions, by those of replica 1's.
    """

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._tokens = tokens
        self._made: dict[str, str] = {}
        self._copies: dict[int, Any] = {}  # by the id of replica 1's object

    def token(self, token: str) -> str:
        """Returns the token of the copy of replica 1's function."""
        if token not in self._made:
            first = _tf.python_function(self._tokens[token])
            second = _tf.python_function(token)
            assert first is not None and second is not None, token  # compared before
            body = self._copy(first.body, second.body)
            self._made[token] = _tf.register_python_function(body, second)
        return self._made[token]

    def _copy(self, one: Any, two: Any) -> Any:
        if one is two:
            return two
        if id(two) in self._copies:
            return self._copies[id(two)]
        if isinstance(two, tuple):
            return tuple(map(self._copy, one, two))
        if isinstance(two, types.FunctionType):
            return self._copy_function(one, two)
        if isinstance(two, types.MethodType):
            function = self._copy(one.__func__, two.__func__)
            return types.MethodType(function, self._copy(one.__self__, two.__self__))
        if isinstance(two, functools.partial):
            keywords = {
                k: self._copy(one.keywords[k], v) for k, v in two.keywords.items()
            }
            arguments = self._copy(one.args, two.args)
            return functools.partial(
                self._copy(one.func, two.func), *arguments, **keywords
            )
        if isinstance(two, bytes) and two.decode("ascii", "replace") in self._tokens:
            return self.token(two.decode()).encode()
        return self.token(two) if isinstance(two, str) and two in self._tokens else two

    def _copy_function(
        self, one: types.FunctionType, two: types.FunctionType
    ) -> types.FunctionType:
        pairs = list(zip(one.__closure__ or (), two.__closure__ or (), strict=True))
        new = types.FunctionType(
            two.__code__,
            two.__globals__,
            two.__name__,
            self._copy(one.__defaults__, two.__defaults__),
            tuple(self._cell(*pair) for pair in pairs),
        )
        self._copies[id(two)] = new
        if one.__kwdefaults__ is not None and two.__kwdefaults__ is not None:
            new.__kwdefaults__ = {
                k: self._copy(one.__kwdefaults__[k], v)
                for k, v in two.__kwdefaults__.items()
            }
        new.__dict__.update(_attributes(two))
        for first, second in pairs:
            cell = self._cell(first, second)
            content = _content(second)
            if cell is not second and content is not _EMPTY:
                cell.cell_contents = self._copy(_content(first), content)
        return new

    def _cell(self, one: Any, two: Any) -> Any:
        """Returns a copy's cell: the one all replicas share, or a new empty one."""
        if one is two:
            return two
        return self._copies.setdefault(id(two), types.CellType())


_EMPTY = "nothing yet"


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY


def _attributes(function: types.FunctionType) -> dict[str, Any]:
    """Returns the attributes the user set on a function, and not those of wrappers."""
    private = ("__wrapped__", "_tf_decorator")
    return {
        name: value
        for name, value in function.__dict__.items()
        if name not in private and not name.startswith(("ag_", "__ag", "autograph"))
    }


def _items(mapping: Mapping[str, Any] | None) -> Any:
    return None if mapping is None else tuple(sorted(mapping.items()))


def _differs(name: str) -> str:
    referents = f"{name}, to which" if name else "objects to which"
    return f"not the same {referents} Python functions refer"
