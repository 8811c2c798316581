# SPDX-License-Identifier: Apache-2.0
"""The law of names: a step computes with what step_fn reads when the step is called.

However the program reads it, a global or an attribute, by itself or by a helper.
"""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

from replicator.step import names_read
from tests import helpers

rate = 1.0
rates = {"first": 1.0}
settings = types.SimpleNamespace(rate=1.0, inner=types.SimpleNamespace(rate=1.0))
_Way = Callable[[], Iterator[Callable[[], Any]]]
_WAYS: dict[str, _Way] = {}


def _way(make: _Way) -> _Way:
    """Enters a generator of a step_fn, which reads another value at each turn."""
    _WAYS[make.__name__.strip("_")] = make
    return make


def _rate() -> Any:
    return rate


def _helper() -> Any:
    return tf.constant(1.0)


@_way
def _global() -> Iterator[Any]:
    global rate
    for rate in (1.0, 2.0, "ab", 3):  # noqa: B007
        yield _step_of_global


def _step_of_global() -> Any:
    return tf.constant(float(len(rate)) if isinstance(rate, str) else float(rate))


@_way
def _global_of_a_helper() -> Iterator[Any]:
    global rate
    for rate in (1.0, 2.0):  # noqa: B007
        yield _step_of_helper


def _step_of_helper() -> Any:
    return tf.add_n([tf.constant(_rate()) for _ in range(2)])


@_way
def _helper_itself() -> Iterator[Any]:
    global _helper
    for k in (1.0, 2.0):
        _helper = functools.partial(tf.constant, k)
        yield lambda_of_helper
        _helper = lambda k=k: tf.constant(10 * k)  # noqa: E731
        yield lambda_of_helper


lambda_of_helper = lambda: _helper()  # noqa: E731


@_way
def _closure() -> Iterator[Any]:
    value = 0.0

    def step_fn() -> Any:
        return (lambda: tf.constant(value))()

    for value in (1.0, 2.0):  # noqa: B007
        yield step_fn


@_way
def _closure_of_a_decorated_function() -> Iterator[Any]:
    value = 0.0

    def decorated(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper() -> Any:
            return function()

        return wrapper

    step_fn = decorated(lambda: tf.constant(value))
    for value in (1.0, 2.0):  # noqa: B007
        yield step_fn


@_way
def _closure_of_a_tf_function() -> Iterator[Any]:
    model = tf.Variable(1.0)
    inner = tf.function(lambda: model * 1.0)
    yield lambda: inner()

    step_fn = tf.function(lambda: tf.identity(model))
    for k in (1.0, 2.0):
        model = tf.constant(k)
        yield step_fn


@_way
def _dict() -> Iterator[Any]:
    for k in (1.0, 2.0):
        rates["first"] = k
        yield _step_of_dict


def _step_of_dict() -> Any:
    return tf.constant(rates["first"])


@_way
def _namespaces() -> Iterator[Any]:
    for k in (1.0, 2.0):
        settings.rate = k
        yield _step_of_namespaces
        settings.inner = types.SimpleNamespace(rate=10 * k)
        yield _step_of_namespaces
        settings.inner.rate = 100 * k
        yield _step_of_namespaces


def _step_of_namespaces() -> Any:
    return tf.constant(settings.rate + settings.inner.rate)


class _Trainer:
    def __init__(self) -> None:
        self.scale, self.steps = 1.0, 0

    def step(self) -> Any:
        return self.scaled(tf.constant(self.twice))

    def scaled(self, value: Any) -> Any:
        return value * self.scale

    @property
    def twice(self) -> float:
        return 2 * self.scale

    def __call__(self) -> Any:
        return self.step()


@_way
def _attributes_of_a_method() -> Iterator[Any]:
    trainer = _Trainer()
    for trainer.scale in (1.0, 2.0):
        yield trainer.step


@_way
def _attributes_of_an_object() -> Iterator[Any]:
    trainer, called = _Trainer(), _Trainer()
    for trainer.scale in (1.0, 2.0):
        yield trainer
    step_fn = functools.partial(lambda one, two: one.scale + two(), trainer, called)
    for k in (1.0, 2.0):
        trainer.scale = k
        yield step_fn
        called.scale = k
        yield step_fn


@_way
def _attributes_of_a_default() -> Iterator[Any]:
    trainer = _Trainer()
    step_fn = lambda own=trainer: own.scale * tf.ones([])  # noqa: E731
    for trainer.scale in (1.0, 2.0):
        yield step_fn


@_way
def _the_cell_of_a_notebook_run_again() -> Iterator[Any]:
    notebook: dict[str, Any] = {"tf": tf}
    exec("def step_fn(): return tf.constant(loss(3.0)) * data", notebook)
    for k in (1.0, 2.0):
        exec(f"data = tf.constant({k})", notebook)
        exec(f"def loss(x): return x + {k}", notebook)
        yield notebook["step_fn"]


@pytest.mark.parametrize("way", _WAYS)
def test_a_step_computes_with_what_its_names_stand_for(way: str) -> None:
    repl = helpers.make(2)
    for step_fn in _WAYS[way]():
        expected = float(getattr(step_fn, "python_function", step_fn)())
        for _ in range(2):
            assert [float(x) for x in repl.run(step_fn)] == [expected] * 2
        step = repl.build(step_fn)
        assert float(step()) == expected


def _built(repl: Any, step_fn: Any, change: Callable[[], None], times: int = 3) -> int:
    """Returns how often a step is built while something is done between its calls."""
    builds: list[None] = []

    @functools.wraps(step_fn)
    def counted() -> Any:
        builds.append(None)
        return step_fn()

    for _ in range(times):
        repl.run(counted)
        change()
    return len(builds) // 2


loss: Any = None
count = 0


def _change_what_is_not_read() -> None:
    global loss
    loss = object()  # a name that _others reads as an attribute only


def _others() -> Any:
    return tf.constant(types.SimpleNamespace(loss=1.0).loss)


def _change_to_equal_values() -> None:
    global rate
    rate = float(str(rate))
    settings.rate = float(str(settings.rate))


def _counts() -> Any:
    global count
    count += 1
    return tf.constant(1.0)


_SAME: dict[str, tuple[Any, Any]] = {
    "an attribute's name": (_others, _change_what_is_not_read),
    "equal values": (
        lambda: tf.constant(rate + settings.rate),
        _change_to_equal_values,
    ),
    "what it assigns itself": (_counts, _counts),
    "nothing": (_step_of_namespaces, lambda: None),
}


@pytest.mark.parametrize("kind", _SAME)
def test_a_step_is_not_built_again_for_less(kind: str) -> None:
    assert _built(helpers.make(2, build="trace"), *_SAME[kind]) == 1


def test_a_change_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    global rate
    repl, model = helpers.make(2), tf.constant(1.0)
    step_fn = lambda: model * rate  # noqa: E731
    rate = 1.0
    for k in range(4):
        assert float(repl.run(step_fn)) == k + rate - k + (k > 0) * k
        model = tf.constant(k + 2.0)
        rate = 1.0
    (message,) = [r.getMessage() for r in caplog.records]
    assert "step_fn at tests/step/test_names_read.py:" in message
    assert "reads `model`, which is another object than when" in message
    assert "built again" in message and "functools.partial" in message


def test_a_counter_does_not_build_a_step_forever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    global rate
    repl, builds = helpers.make(2, build="trace"), []

    def step_fn() -> Any:
        builds.append(rate)
        return tf.constant(rate)

    returned = []
    for k in range(10):
        rate = float(k)
        returned.append(float(repl.run(step_fn)))
    assert returned == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0, 5.0]
    assert len(builds) == 2 * 6
    first, last = [r.getMessage() for r in caplog.records]
    assert "`rate`, which was 0.0 when the step was built and is 1.0; the" in first
    assert "was 5.0 when the step was built and is 6.0; as at 5 calls before" in last
    assert "goes on with the value that it was built with last" in last
    assert "args=(...)" in first and "args=(...)" in last


def test_nothing_is_kept_of_what_a_step_reads() -> None:
    repl = helpers.make(2)

    class Owner:
        def __init__(self) -> None:
            self.scale = 1.0
            self.step = lambda: tf.constant(self.scale)

    owner = Owner()
    repl.run(owner.step)
    held = weakref.ref(owner), weakref.ref(owner.step)
    del owner
    gc.collect()
    assert [ref() for ref in held] == [None, None]
    assert len(repl._steps._functions) == 0


def test_an_object_in_the_place_of_one_that_is_gone_is_another() -> None:
    value: Any = _Trainer()
    step_fn = lambda: value  # noqa: E731
    names = names_read.Names(step_fn)
    assert names.is_unchanged() and not names.changes()
    value = None  # as weak references to what is gone give
    gc.collect()
    assert not names.is_unchanged() and names.changes()[0].name == "value"


def test_a_name_that_is_gone_fails_as_in_python() -> None:
    repl, notebook = helpers.make(2), {"tf": tf, "x": 1.0}
    exec("def step_fn(): return tf.constant(x)", notebook)
    repl.run(notebook["step_fn"])
    del notebook["x"]
    with pytest.raises(NameError, match="'x' is not defined"):
        repl.run(notebook["step_fn"])
