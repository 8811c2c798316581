# SPDX-License-Identifier: Apache-2.0
"""The law Freshness: a step's inputs come from the function that was passed last.

Covers every way in which notebooks, loops, classes and partials make functions: of one
code object or many, whose captured values are rebound, freed or changed in type. The
same holds for step_fns: their values are those of the function that was passed.
"""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from tests import helpers

_TURNS = 5  # functions that each way makes
_Function = Callable[[], Any]
_Give = Callable[[float], Any]  # what a function returns for its number
_WAYS: dict[str, Callable[[_Give], Iterator[_Function]]] = {}


def _way(make: Callable[[_Give], Iterator[_Function]]) -> Any:
    """Enters a generator of functions, each of which returns another number."""
    _WAYS[make.__name__.strip("_").replace("_", " ")] = make
    return make


value = 0.0  # a global that functions read


@_way
def _lambdas_that_read_a_rebound_global(give: _Give) -> Iterator[_Function]:
    global value
    for k in range(_TURNS):
        value = float(k)
        yield lambda: give(value)  # noqa: B023, that is the point


@_way
def _lambdas_that_read_a_rebound_local(give: _Give) -> Iterator[_Function]:
    for k in range(_TURNS):
        yield lambda: give(float(k))  # noqa: B023, that is the point


@_way
def _nested_functions_that_hold_freed_objects(give: _Give) -> Iterator[_Function]:
    for k in range(_TURNS):

        def make(data: dict[str, float]) -> _Function:
            def function() -> Any:
                return give(data["x"])

            return function

        yield make({"x": float(k)})  # whose id is free again after the turn


@_way
def _default_arguments(give: _Give) -> Iterator[_Function]:
    for k in range(_TURNS):
        yield lambda data=[float(k)]: give(data[0])


@_way
def _keyword_defaults(give: _Give) -> Iterator[_Function]:
    for k in range(_TURNS):
        yield lambda *, data=float(k): give(data)


@_way
def _the_cell_of_a_notebook_run_again(give: _Give) -> Iterator[_Function]:
    notebook: dict[str, Any] = {"give": give}
    for k in range(_TURNS):
        exec(f"data = {float(k)}", notebook)
        exec("def function(): return give(data)", notebook)
        yield notebook["function"]


@_way
def _a_cell_run_in_new_globals(give: _Give) -> Iterator[_Function]:
    code = compile("def function(): return give(data)", "<cell>", "exec")
    for k in range(_TURNS):
        notebook = {"data": float(k), "give": give}
        exec(code, notebook)
        yield notebook["function"]


class _Source:
    """Equal to all others, as by a careless __eq__."""

    def __init__(self, number: float, give: _Give) -> None:
        self.number, self.give = number, give

    def method(self) -> Any:
        return self.give(self.number)

    def __call__(self) -> Any:
        return self.give(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Source)

    def __hash__(self) -> int:
        return 0


@_way
def _methods_of_new_objects(give: _Give) -> Iterator[_Function]:
    for k in range(_TURNS):
        yield _Source(float(k), give).method


@_way
def _methods_of_objects_that_stay(give: _Give) -> Iterator[_Function]:
    sources = [_Source(float(k), give) for k in range(_TURNS)]
    for k in range(_TURNS):
        yield sources[k].method


@_way
def _callable_objects(give: _Give) -> Iterator[_Function]:
    for k in range(_TURNS):
        yield _Source(float(k), give)


@_way
def _methods_put_on_one_object(give: _Give) -> Iterator[_Function]:
    source = _Source(0.0, give)
    for k in range(_TURNS):
        function = types.MethodType(lambda self, k=k: self.give(float(k)), source)
        source.method = function  # type: ignore[method-assign]
        yield source.method


@_way
def _static_and_class_methods_of_new_classes(give: _Give) -> Iterator[_Function]:
    for k in range(_TURNS):

        class Made:
            number = float(k)

            @classmethod
            def of_class(cls) -> Any:
                return give(cls.number)

            @staticmethod
            def static(k: int = k) -> Any:
                return give(float(k))

        yield Made.static if k % 2 else Made.of_class


@_way
def _partials_of_equal_arguments_of_other_types(give: _Give) -> Iterator[_Function]:
    def kind(argument: Any) -> Any:
        return give([int, float, bool, str, tuple].index(type(argument)))

    for argument in (1, 1.0, True, "1", (1, 1.0)):
        yield functools.partial(kind, argument)


@_way
def _partials_of_zeros(give: _Give) -> Iterator[_Function]:
    def positive(argument: Any) -> Any:
        return give(float(str(argument) == "0.0"))

    for argument in (0.0, -0.0):
        yield functools.partial(positive, argument)


@_way
def _partials_of_tuples_and_keywords(give: _Give) -> Iterator[_Function]:
    def lengths(x: Any, y: Any) -> Any:
        return give(10 * len(str(x)) + len(str(y)))

    kinds = [(int, float), (float, int), (bool, int), (int, bool), (int, int)]
    for first, second in kinds:
        yield functools.partial(lengths, first(1), y=(second(1),))


@_way
def _partials_of_lists_and_of_new_objects(give: _Give) -> Iterator[_Function]:
    def first(numbers: list[float]) -> Any:
        return give(numbers[0])

    for k in range(_TURNS):
        yield functools.partial(first, [float(k)])
        yield functools.partial(_Source.method, _Source(float(k), give))


@_way
def _decorated_functions(give: _Give) -> Iterator[_Function]:
    def decorated(function: _Function) -> _Function:
        @functools.wraps(function)
        def wrapper() -> Any:
            return function()

        return wrapper

    for k in range(_TURNS):
        yield decorated(lambda k=k: give(float(k)))


@_way
def _recursive_functions(give: _Give) -> Iterator[_Function]:
    for k in range(_TURNS):

        def function(depth: int = 2, k: int = k) -> Any:
            return function(depth - 1, k) if depth else give(float(k))

        yield function


_KINDS: dict[str, _Give] = {
    "dataset": lambda k: tf.data.Dataset.from_tensors(k).repeat(),
    "tensor": tf.constant,
    "function": lambda k: lambda: tf.constant(k),
}


def _echo(x: Any) -> Any:
    return x


def _values(returned: Any) -> list[float]:
    return [float(v) for v in returned]


def _number(returned: Any) -> float:
    """Returns the number in a function's latest result."""
    if isinstance(returned, tf.data.Dataset):
        returned = next(iter(returned))
    return float(returned() if callable(returned) else returned)


@pytest.mark.battery(5)
@pytest.mark.parametrize("way", _WAYS)
def test_a_step_is_fed_what_the_function_handed_last_returns(way: str) -> None:
    repl = helpers.make(2)
    for function in _WAYS[way](_KINDS["dataset"]):
        assert _values(repl.run(_echo, function)) == [_number(function())] * 2


@pytest.mark.battery(5)
@pytest.mark.parametrize("way", _WAYS)
def test_a_step_is_the_function_handed_last(way: str) -> None:
    repl = helpers.make(2)
    for function in _WAYS[way](_KINDS["tensor"]):
        assert _values(repl.run(function)) == [_number(function())] * 2


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("mode", helpers.MODES)
def test_so_it_is_for_each_kind_of_input_and_in_each_mode(mode: str, kind: str) -> None:
    repl = helpers.make(2)
    number = 0.0

    def function(k: float) -> Callable[[], Any]:
        nonlocal number
        number = k
        return lambda: _KINDS[kind](number)

    with tf.Graph().as_default() if mode == "session" else tf.init_scope():
        for k in (1.0, 2.0, 3.0):
            input_fn = function(k)
            if mode == "session":
                fetches = repl.run(_echo, input_fn)
                with tf.compat.v1.Session() as session:
                    repl.initialize(session)
                    fed = session.run(fetches)
            elif mode == "function":
                fed = tf.function(functools.partial(repl.run, _echo, input_fn))()
            else:
                fed = repl.run(_echo, input_fn)
            assert _values(fed) == [k, k]


def test_epochs_of_a_rebound_dictionary() -> None:
    """A bug's original program: 2, 4, 6, 4, 6, 4 instead of 2, ..., 12."""
    repl = helpers.make(2)

    def train(epochs: int) -> list[float]:
        elements = []
        for epoch in range(1, epochs + 1):
            data = {"x": tf.constant([2.0 * epoch, 2.0 * epoch])}
            slices = tf.data.Dataset.from_tensor_slices
            fed = repl.run(_echo, lambda: slices(data))  # noqa: B023
            elements.append(float(fed["x"][1]))
        return elements

    assert train(6) == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]


def test_the_same_function_goes_on_and_others_between_change_nothing() -> None:
    repl = helpers.make(2)

    def input_fn() -> tf.data.Dataset:
        return tf.data.Dataset.range(100)

    for k in range(4):
        assert _values(repl.run(_echo, input_fn)) == [2 * k, 2 * k + 1]
        assert _values(repl.run(_echo, lambda: tf.data.Dataset.range(9))) == [0, 1]


def test_inputs_of_a_function_that_is_gone_start_over_where_a_graph_uses_them() -> None:
    repl = helpers.make(2)
    call = tf.function(lambda: repl.run(_echo, lambda: tf.data.Dataset.range(9)))
    for _ in range(2):
        assert _values(call()) == [0.0, 1.0]
        assert _values(call()) == [2.0, 3.0]
        repl.initialize()


def test_variables_of_a_step_stay_when_its_inputs_are_new() -> None:
    repl = helpers.make(2)

    def step_fn(x: Any) -> Any:
        return tf.Variable(0.0).assign_add(x)

    for k in range(1, 4):
        (one, two) = repl.run(step_fn, lambda k=k: tf.constant(float(k)))
        assert float(one) == float(two) == k * (k + 1) / 2


def test_variables_of_functions_of_one_code_are_not_shared() -> None:
    """Not even if one reuses the id of another."""
    repl = helpers.make(2)
    for k in range(6):
        (one, _) = repl.run(lambda k=k: tf.Variable(float(k)).assign_add(1.0))
        assert float(one) == k + 1.0


def test_an_input_fn_that_is_new_each_time_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl = helpers.make(2)
    for k in range(8):
        repl.build(_echo, lambda k=k: tf.constant(k))
    messages = [
        r.getMessage() for r in caplog.records if "new function" in r.getMessage()
    ]
    assert len(messages) == 1
    assert "input_fn at " in messages[0] and "test_freshness.py:" in messages[0]
    assert "inputs start over" in messages[0] and "outside the loop" in messages[0]


def test_nothing_is_kept_of_functions_that_are_gone() -> None:
    repl = helpers.make(2)
    for way in _WAYS.values():
        for function in way(_KINDS["tensor"]):
            repl.build(_echo, function)
            repl.build(function)
        del function
    gc.collect()  # classes are in reference cycles
    assert (len(repl._steps._functions), len(repl._steps._states)) == (1, 0), (
        "_echo, never run alone"
    )
