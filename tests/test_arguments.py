# SPDX-License-Identifier: Apache-2.0
"""Arguments are checked without trusting their own methods."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import arguments
from tests import helpers


class Hostile:
    """Answers every question wrongly."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("asked")

    def __index__(self) -> int:
        raise TypeError("no number")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("value", [0, 7, arguments.LARGEST])
def test_whole_numbers(value: int) -> None:
    assert arguments.is_whole(value)
    assert arguments.as_whole(np.int64(value)) == value


@pytest.mark.parametrize("value", [True, -1, 2**31, 1.0, "1", None, Hostile()])
def test_what_is_no_whole_number(value: Any) -> None:
    assert not arguments.is_whole(value)


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1", None, Hostile()])
def test_what_is_no_index(value: Any) -> None:
    assert arguments.as_whole(value) is None


def test_tensors_of_resources_are_no_index() -> None:
    assert arguments.as_whole(tf.Variable(1).handle) is None


@pytest.mark.parametrize("value", [Hostile(), np.zeros(3), [1], {}])
def test_what_cannot_be_compared_is_no_choice(value: Any) -> None:
    assert not arguments.is_choice(value, ("mirrored", True, None))


def test_functions_that_refuse_a_number_of_arguments() -> None:
    assert arguments.refuses(lambda x: x, 2)
    assert not arguments.refuses(lambda *x: x, 2)
    assert not arguments.refuses(print, 2)


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("dtype", [">f4", "<f4", ">i8", "<i8"])
def test_arrays_of_either_byte_order_are_communicated(dtype: str, mode: str) -> None:
    """TensorFlow would read a large-end-first array backwards in a graph."""
    values = np.array([1, 2, 3], dtype)
    repl = helpers.make(2)
    results = helpers.run(mode, repl, lambda: lambda: repl.all_reduce(values))
    for result in results:
        np.testing.assert_array_equal(result, [2, 4, 6])


@pytest.mark.parametrize("dtype", [">f4", "<f4"])
def test_arrays_of_either_byte_order_are_assigned(dtype: str) -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable([0.0, 0.0])

    def step() -> None:
        variable.assign(np.array([1, 2], dtype))

    repl.run(step)
    np.testing.assert_array_equal(variable, [1, 2])
