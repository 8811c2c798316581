# SPDX-License-Identifier: Apache-2.0
"""The functions that count as the same; tests/test_freshness.py tests the effects."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from typing import Any

import pytest
import tensorflow as tf

from replicator.step import cache


class _Thing:
    def method(self) -> None:
        """Does nothing."""

    def __call__(self) -> None:
        """Does nothing."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def _function(value: Any = None) -> Any:
    return lambda: value


def _same(one: Any, two: Any) -> bool:
    return cache.identity(one)[0] == cache.identity(two)[0]


_thing, _list, _word = _Thing(), [1], "a" * 30
_SAME = {
    "function": lambda: _function,
    "method": lambda: _thing.method,
    "object": lambda: _thing,
    "builtin method": lambda: _WATCHED.copy,
    "slot": lambda: _thing.__str__,
    "class": lambda: _Thing,
    "partial": lambda: functools.partial(_function, 1, value=2.0),
    "partial of a method": lambda: functools.partial(_thing.method),
    "partial of an object": lambda: functools.partial(_function, _thing),
    "partial of tuples": lambda: functools.partial(_function, (1, ("a", None))),
    "partial of nan": lambda: functools.partial(_function, float("nan")),
    "none": lambda: None,
}
_WATCHED = {1, 2}


@pytest.mark.parametrize("name", _SAME)
def test_a_function_that_python_makes_anew_at_each_look_is_the_same(name: str) -> None:
    assert _same(_SAME[name](), _SAME[name]())


def test_all_others_are_different() -> None:
    partial = functools.partial
    functions = [make() for make in _SAME.values()]
    functions += [_function(1), _function(1), _Thing(), _Thing().method, _list.copy]
    functions += [partial(_function, x) for x in (1, 1.0, True, "1", b"1", None)]
    functions += [partial(_function, x) for x in (0.0, -0.0, 0, False, 0j, 2, (2,))]
    functions += [partial(_function, value=1), partial(_function, (1.0,))]
    functions += [partial(_function, ((1,), 2)), partial(_function, (1, (2,)))]
    functions += [partial(_function, [1]), partial(_function, [1]), partial(_list.copy)]
    functions += [tf.function(_function), tf.function(_function), {1, 2}.copy]
    keys = [cache.identity(function)[0] for function in functions]
    assert len(set(keys)) == len(functions)


def test_a_partial_of_what_cannot_be_watched_is_the_same_as_itself() -> None:
    one, two = (functools.partial(_function, _list) for _ in range(2))
    assert _same(one, one) and not _same(one, two)


@pytest.mark.parametrize(
    "make",
    [
        _function,
        _Thing,
        lambda: _Thing().method,
        lambda: functools.partial(_function, _Thing()),
        lambda: functools.partial(_function, [1]),
        lambda: functools.partial(_Thing().method, 1),
    ],
)
def test_a_value_goes_with_its_function(make: Any) -> None:
    table: cache.Table[_Thing] = cache.Table()
    function = make()
    value = weakref.ref(table.get(function, _Thing))
    assert value() is not None and len(table) == 1
    assert table.get(function, _Thing) is value()
    assert table.get(function, _Thing, "else") is not value()
    del function
    assert value() is None and len(table) == 0


def test_a_function_that_cannot_be_watched_stays() -> None:
    class Slots:
        __slots__ = ()

        def __call__(self) -> None:
            """Does nothing."""

    table: cache.Table[_Thing] = cache.Table()
    values = [table.get(Slots(), _Thing) for _ in range(3)]
    assert len({id(value) for value in values}) == len(table) == 3


def test_a_table_is_freed_with_all_it_has() -> None:
    table: cache.Table[_Thing] = cache.Table()
    value = weakref.ref(table.get(_function, _Thing))
    del table
    gc.collect()
    assert value() is None


def test_threads_get_one_value() -> None:
    table: cache.Table[_Thing] = cache.Table()
    start = threading.Barrier(8)
    seen = []

    def work() -> None:
        start.wait(30)
        for k in range(50):
            seen.append((k, id(table.get(_function, _Thing, k))))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(seen) == 400 and len(set(seen)) == 50


def test_functions_of_one_code_are_counted_until_the_code_is_gone() -> None:
    counts = cache.FunctionCounts()
    wrapped = [
        functools.wraps(_function)(functools.partial(_function)),
        _Thing().method,
    ]
    assert [counts.count(_function()) for _ in range(3)] == [1, 2, 3]
    assert [counts.count(f) for f in (_function, *wrapped, _Thing())] == [1, 2, 1, 1]
    assert counts.count(_function()) == 4
    notebook: dict[str, Any] = {}
    for _ in range(3):
        exec("def function(): return 0", notebook)
        assert counts.count(notebook["function"]) == 1
    assert counts.count(len) == counts.count(None) == 0


def test_the_line_of_a_function_is_that_of_its_code() -> None:
    line = f"{__file__}:{_function.__code__.co_firstlineno}"
    for function in (_function, functools.partial(_function), tf.function(_function)):
        assert cache.line_of(function) == line
    assert cache.line_of(len) == ""
