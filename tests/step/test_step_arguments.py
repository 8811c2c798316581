# SPDX-License-Identifier: Apache-2.0
"""The arguments of step_fn: an element, its parts, and args."""

from __future__ import annotations

import collections
import functools
from typing import Any

import pytest
import tensorflow as tf

from replicator import ArgumentError
from tests import helpers

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
@pytest.mark.parametrize("data", _DATA)
@pytest.mark.parametrize("kind", TWO)
@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_tuple_is_unpacked_for_two_parameters(
    mode: str, kind: str, data: str
) -> None:
    repl, kept = helpers.make(2), TWO[kind]()
    actual = helpers.run(mode, repl, lambda: kept, lambda: _DATA[data]())
    assert [float(v) for v in actual] == [5.0, 5.0]


@pytest.mark.parametrize(
    "step_fn",
    [
        lambda x: x[0] + 2 * x[1],
        lambda x, k=2.0: x[0] + k * x[1],
        lambda *x: x[0][0] + 2 * x[0][1],
    ],
    ids=["one", "one and a default", "any number"],
)
def test_one_parameter_gets_the_element_as_a_whole(step_fn: Any) -> None:
    actual = helpers.make(2).run(step_fn, lambda: (tf.constant(1.0), tf.constant(2.0)))
    assert [float(v) for v in actual] == [5.0, 5.0]


def test_args_follow_the_parts() -> None:
    repl = helpers.make(2)
    data = tf.data.Dataset.from_tensors((1.0, 2.0)).repeat()
    assert float(repl.run(lambda x, y, z: x + y * z, data, args=(5.0,))) == 11.0
    assert float(repl.run(lambda e, z: e[0] + e[1] * z, data, args=(5.0,))) == 11.0
    three = (1.0, 2.0, 3.0)
    actual = repl.run(lambda x, y, z, w=0.0: x + y * z + w, lambda: three)
    assert float(actual) == 7.0


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
