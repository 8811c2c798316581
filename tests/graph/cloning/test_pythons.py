# SPDX-License-Identifier: Apache-2.0
"""The equality of Python functions inside of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.cloning import pythons

shared = [1]


class Thing:
    def method(self, x: Any) -> Any:
        return x


thing = Thing()


def plain(x: Any, *_: Any) -> Any:
    return x


def closing(value: Any) -> Callable[..., Any]:
    return lambda x: (x, value)


def default(value: Any) -> Callable[..., Any]:
    def function(x: Any, value: Any = value) -> Any:
        return x

    return function


def keyword(value: Any) -> Callable[..., Any]:
    def function(x: Any, *, value: Any = value) -> Any:
        return x

    return function


def nested(value: Any) -> Callable[..., Any]:
    return closing(lambda: closing(value))


def attribute(value: Any) -> Callable[..., Any]:
    function = closing(1)
    function.value = value  # type: ignore[attr-defined]
    return function


def partial(value: Any) -> Callable[..., Any]:
    return functools.partial(plain, 1, value)


def recursive(value: Any) -> Callable[..., Any]:
    def function(x: Any) -> Any:
        return function(value)

    return function


MAKERS = (closing, default, keyword, nested, attribute, partial, recursive)
ALIKE = {
    "ints": (1, 1),
    "floats": (0.5, 0.5),
    "texts": ("a", "a"),
    "nothing": (None, None),
    "dtypes": (tf.float32, tf.as_dtype("float32")),
    "tuples": ((1, ("a", 2.0)), (1, ("a", 2.0))),
    "the same list": (shared, shared),
    "methods": (thing.method, thing.method),
}
UNLIKE = {
    "numbers": (1, 2),
    "types": (1, 1.0),
    "truth": (1, True),
    "signs of zero": (0.0, -0.0),
    "texts": ("a", "b"),
    "lengths": ((1,), (1, 2)),
    "inside of tuples": ((1, 2), (1, 3)),
    "lists, which may change": ([1], [1]),
    "objects": (Thing(), Thing()),
    "methods": (Thing().method, Thing().method),
    "functions": (lambda: 1, lambda: 2),
}


def difference(
    one: Any, two: Any, ones: Any = tf.float32, twos: Any = tf.float32
) -> str:
    """Returns the difference between two functions, one registered by each replica."""
    with tf.Graph().as_default():
        tensors = [
            tf.py_function(function, [1.0], dtype)
            for function, dtype in ((one, ones), (two, twos))
        ]
        tokens = [tensor.op.get_attr("token").decode() for tensor in tensors]
        return pythons.Pairs().difference(*tokens)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", ALIKE)
def test_functions_that_refer_to_the_same(name: str, make: Any) -> None:
    one, two = ALIKE[name]
    assert difference(make(one), make(two)) == ""


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("name", UNLIKE)
def test_functions_that_do_not(name: str, make: Any) -> None:
    one, two = UNLIKE[name]
    assert "not the same" in difference(make(one), make(two))


def test_one_function_and_others() -> None:
    assert difference(plain, plain) == ""
    assert "not the same Python function" in difference(plain, closing(1))
    assert "different results" in difference(plain, plain, twos=tf.int32)


def test_cells_are_shared_by_the_same_functions() -> None:
    def frame() -> tuple[Any, Any]:
        value = 0

        def write(x: Any) -> Any:
            nonlocal value
            value = x
            return x

        return write, lambda x: value

    def together() -> Any:
        return closing(frame())

    def apart() -> Any:
        return closing((frame()[0], frame()[1]))

    assert difference(together(), together()) == ""
    assert difference(apart(), apart()) == ""
    assert "value, to which" in difference(apart(), together())
    assert "value, to which" in difference(together(), apart())


def test_unknown_tokens() -> None:
    assert "unknown" in pythons.Pairs().difference("pyfunc_x", "pyfunc_y")
