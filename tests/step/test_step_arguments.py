# SPDX-License-Identifier: Apache-2.0
"""The arguments of step_fn: an element, its parts, and args."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import ArgumentError, InputError, PerReplica
from tests import helpers, sampling

Pair = collections.namedtuple("Pair", "x y")
_DATA = {
    "tuple": lambda: (1.0, 2.0),
    "list": lambda: [1.0, 2.0],
    "namedtuple": lambda: Pair(1.0, 2.0),
    "dataset": lambda: tf.data.Dataset.from_tensors((1.0, 2.0)).repeat(),
}


class _Model:
    def step(self, x: Any, y: Any) -> Any:
        return x + 2 * y


TWO = {
    "function": lambda: lambda x, y: x + 2 * y,
    "method": lambda: _Model().step,
    "partial": lambda: functools.partial(lambda x, y, k: x + k * y, k=2.0),
    "tf.function": lambda: tf.function(lambda x, y: x + 2 * y),
    "default": lambda: lambda x, y, k=2: x + k * y,
}


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("kind", "data", "mode"), sampling.in_turn([*TWO], [*_DATA], helpers.MODES)
)
def test_a_tuple_is_unpacked_for_two_parameters(
    mode: str, kind: str, data: str
) -> None:
    repl, kept = helpers.make(2), TWO[kind]()
    actual = helpers.run(mode, repl, lambda: kept, lambda: _DATA[data]())
    assert [float(v) for v in actual] == [5.0, 5.0]


PAIR, THREE = (1.0, 2.0), (1.0, 2.0, 3.0)
# A step_fn, the element, args, and the result.
FILLED: dict[str, tuple[Callable[..., Any], Any, tuple[Any, ...], Any]] = {
    "one": (lambda x: x[0] + 2 * x[1], PAIR, (), 5.0),
    "one and a default": (lambda x, k=2.0: x[0] + k * x[1], PAIR, (), 5.0),
    "any number": (lambda *x: x[0][0] + 2 * x[0][1], PAIR, (), 5.0),
    # Parts fill parameters that are None by default, and no settings.
    "none": (lambda x, y=None: x if y is None else x + 2 * y, PAIR, (), 5.0),
    "further": (
        lambda x, y=None, z=None: x + 2 * y if z is None else z,
        PAIR,
        (),
        5.0,
    ),
    "then a setting": (lambda x, y=None, k=0.0: x + 2 * y + k, PAIR, (), 5.0),
    "partial": (
        functools.partial(lambda x, y=None, k=0.0: x + k * y, k=2.0),
        *(PAIR, (), 5.0),
    ),
    "args of one": (
        lambda e, y=None, *, z=None: (e, y),
        PAIR,
        (7.0,),
        (PAIR, 7.0),
    ),
    "a setting": (
        lambda e, training=1.0: (e, training),
        PAIR,
        (),
        (PAIR, 1.0),
    ),
    "by name": (lambda e, *, y=None: (e, y or 7.0), PAIR, (), (PAIR, 7.0)),
    "more by name": (
        lambda *e, y=None: (*e, y or 7.0),
        PAIR,
        (),
        (PAIR, 7.0),
    ),
    # Parts precede args.
    "args": (lambda x, y=None, k=1.0: (x + 2 * y) * k, PAIR, (10.0,), 50.0),
    "three": (lambda x, y, z: x + y * z, PAIR, (5.0,), 11.0),
    "an element and args": (lambda e, z: e[0] + e[1] * z, PAIR, (5.0,), 11.0),
    "three parts": (lambda x, y, z, w=0.0: x + y * z + w, THREE, (), 7.0),
}


@pytest.mark.parametrize("data", ["tuple", "dataset"])
@pytest.mark.parametrize("kind", FILLED)
def test_parts_fill_parameters(kind: str, data: str) -> None:
    step_fn, element, args, expected = FILLED[kind]
    inputs: Any = element
    if data == "dataset":
        inputs = tf.data.Dataset.from_tensors(element).repeat()
    results = helpers.make(2).run(step_fn, inputs, args=args)
    wanted = [value for value in tf.nest.flatten(expected) for _ in range(2)]
    assert [float(x) for x in tf.nest.flatten(results)] == wanted


def test_more_parts_than_parameters_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"(?s)2 arg.*a tuple of 3.*, \*, y=None"):
        helpers.make(2).run(lambda x, y=None: x, (1.0, 2.0, 3.0))


WRONG = {
    "a dict": ({"x": 1.0, "y": 2.0}, 2, "is a dict"),
    "three": ((1.0, 2.0, 3.0), 2, "is a tuple of 3"),
    "one": ((1.0,), 2, "is a tuple of 1"),
    "a tensor": (tf.zeros([2]), 2, "is one tensor"),
    "two": ((1.0, 2.0), 3, "is a tuple of 2"),
}


@pytest.mark.parametrize(("element", "count", "said"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("mode", helpers.MODES)
def test_an_element_of_other_parts_is_refused(
    mode: str, element: Any, count: int, said: str
) -> None:
    def two(images: Any, labels: Any) -> Any:
        return images

    def three(images: Any, labels: Any, weights: Any) -> Any:
        return images

    step_fn = {2: two, 3: three}[count]
    with pytest.raises(
        ArgumentError,
        match=rf"(?s)step_fn takes {count} arguments from each element .* {said}\."
        r".*step_fn: tests/step/test_step_arguments\.py:\d+ in t.*"
        rf"Fix: let the inputs yield tuples of {count}",
    ):
        helpers.run(
            mode,
            helpers.make(2),
            lambda: step_fn,
            lambda: tf.nest.map_structure(
                lambda x: x.numpy() if tf.is_tensor(x) else x, element
            ),
        )


def test_two_parameters_without_inputs_are_refused() -> None:
    with pytest.raises(ArgumentError, match="cannot be called with 0 arguments"):
        helpers.make(2).run(lambda x, y: x)


_X, _Y = np.ones([4, 2], np.float32), np.ones([4, 1], np.float32)
MISPLACED = {
    "array": ((_X, _Y), "a ndarray as input_mode"),
    "tensor": ((_X, tf.constant(_Y)), "an EagerTensor as input_mode"),
    "datasets": ((tf.data.Dataset.range(2),) * 2, "a _RangeDataset as input_mode"),
    "PerReplica": ((PerReplica(1.0, 2.0),) * 2, "a PerReplica as input_mode"),
    "dicts": (({"x": _X}, {"y": _Y}), "a dict as input_mode"),
    "tuple": ((_X, (_Y,)), "a tuple as input_mode"),
    "number": ((_X, 0.1), "a float as input_mode"),
    "fourth": ((_X, "global_batch", _Y), "a ndarray as steps_per_call"),
}


@pytest.mark.parametrize(("given", "said"), MISPLACED.values(), ids=MISPLACED)
def test_data_in_place_of_a_setting_is_refused(given: Any, said: str) -> None:
    repl = helpers.make(2)
    for call in (repl.run, repl.build):
        with pytest.raises(
            InputError,
            match=rf"(?s)was given {said}.* at tests/step/test_step_arguments\.py:"
            r".*Fix: .*one tuple, repl.run\(step_fn, \(x, y\)\).*args=",
        ):
            call(lambda x, y: x, *given)
