# SPDX-License-Identifier: Apache-2.0
"""Loops that end with the longest sequence are split only if one device agrees."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist.kinds import Kind
from tests.autodist.helpers import known
from tests.helpers import v1_control_flow

v1 = tf.compat.v1

# Whether there is another turn: by the turn t and the lengths n.
TESTS: dict[str, Callable[[Any, Any], Any]] = {
    "t < max": lambda t, n: t < tf.reduce_max(n),
    "t <= max": lambda t, n: t <= tf.reduce_max(n),
    "max > t": lambda t, n: tf.reduce_max(n) > t,
    "within bounds": lambda t, n: t < tf.minimum(5, tf.maximum(1, tf.reduce_max(n))),
    "within other bounds": lambda t, n: (
        t < tf.maximum(2, tf.minimum(tf.reduce_max(n), 3))
    ),
    "and another": lambda t, n: tf.logical_and(t < 4, t < tf.reduce_max(n)),
    "any": lambda t, n: tf.reduce_any(t < n),
    "min": lambda t, n: t < tf.reduce_min(n),
    "two": lambda t, n: tf.logical_and(t < tf.reduce_max(n), t < tf.reduce_max(9 - n)),
    "sum": lambda t, n: t < tf.reduce_sum(n),
    "max plus 1": lambda t, n: t < tf.reduce_max(n) + 1,
}
# The new h of a turn, given its value if all sequences were equally long.
TURNS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "t >= n": lambda t, n, h, new: tf.where(t >= n, h, new),
    "t > n": lambda t, n, h, new: tf.where(t > n, h, new),
    "t < n": lambda t, n, h, new: tf.where(t < n, new, h),
    "t <= n": lambda t, n, h, new: tf.where(t <= n, new, h),
    "n > t": lambda t, n, h, new: tf.where(n > t, new, h),
    "n >= t": lambda t, n, h, new: tf.where(n >= t, new, h),
    "not": lambda t, n, h, new: tf.where(tf.logical_not(t < n), h, new),
    "added": lambda t, n, h, new: h + tf.where(t < n, new, tf.zeros_like(h)),
    "the other way": lambda t, n, h, new: tf.where(t < n, h, new),
    "other lengths": lambda t, n, h, new: tf.where(t < 3 - n, new, h),
    "half": lambda t, n, h, new: tf.where(2 * t < n, new, h),
    "always": lambda t, n, h, new: new,
    "kept": lambda t, n, h, new: tf.identity(h),
}
KNOWN = {  # the loops, of all, that are split
    *itertools.product(
        ("t < max", "t <= max", "max > t", "within bounds", "and another", "any"),
        ("t >= n", "t < n", "n > t", "not", "added", "kept"),
    ),
    *(("t <= max", name) for name in ("t > n", "t <= n", "n >= t")),
    *((name, "kept") for name in TESTS),
}
DATA = np.array([[2, 0.5, 1], [1, 0.1, 2], [4, -0.3, 3], [0, 0.2, 1]], np.float32)


def _loop(test: str, turn: str, step: int = 1) -> Callable[[tf.Tensor], tf.Tensor]:
    def make(x: tf.Tensor) -> tf.Tensor:
        lengths = tf.cast(x[:, 0], tf.int32)

        def turned(t: tf.Tensor, made: tf.Tensor, k: tf.Tensor) -> tuple[Any, ...]:
            new = 0.5 * made + x[:, 1] + tf.cast(t, tf.float32)
            return t + step, TURNS[turn](t, lengths, made, new), k + 1

        return tf.while_loop(
            lambda t, made, k: tf.logical_and(k < 6, TESTS[test](t, lengths)),
            *(turned, [0, x[:, 2], 0]),
        )[1]

    return make


def _computed(make: Callable[[tf.Tensor], tf.Tensor], data: np.ndarray) -> np.ndarray:
    with tf.Graph().as_default(), v1.Session() as session:
        x = v1.placeholder(tf.float32, [None, data.shape[1]])
        return session.run(make(x), {x: data})


def _is_split(make: Callable[[tf.Tensor], tf.Tensor]) -> bool:
    """Whether the result has rows; if so, they must be those of the whole batch."""
    _, value = known(make)
    assert value.mixed is None
    if value.kind is not Kind.ROWS:
        assert value.kind is Kind.UNKNOWN
        return False
    for order in (DATA, DATA[::-1], DATA[[1, 2, 3, 0]]):
        parts = [_computed(make, order[:1]), _computed(make, order[1:])]
        whole = _computed(make, order)
        np.testing.assert_array_equal(np.concatenate(parts, value.axis), whole)
    return True


@pytest.mark.battery(10)
@pytest.mark.parametrize("flow", [contextlib.nullcontext, v1_control_flow])
@pytest.mark.parametrize("test", TESTS)
def test_a_loop_is_split_if_its_further_turns_keep_what_has_ended(
    test: str, flow: Any
) -> None:
    with flow():
        actual = {turn for turn in TURNS if _is_split(_loop(test, turn))}
    assert actual >= {turn for known_test, turn in KNOWN if known_test == test}


@pytest.mark.parametrize("flow", [contextlib.nullcontext, v1_control_flow])
@pytest.mark.parametrize("step", [0, -1])
def test_it_is_not_if_what_is_compared_with_the_lengths_does_not_grow(
    step: int, flow: Any
) -> None:
    with flow():
        assert not _is_split(_loop("t < max", "t >= n", step))


LISTS: dict[str, tuple[Callable[..., Any], bool]] = {
    "zeros": (lambda t, n, x: (t, tf.where(t >= n, tf.zeros_like(x), x)), True),
    "ones": (lambda t, n, x: (t, tf.where(t >= n, tf.ones_like(x), x)), False),
    "all": (lambda t, n, x: (t, x), False),
    "over": (lambda t, n, x: (t // 2, tf.where(t >= n, tf.zeros_like(x), x)), False),
}


@pytest.mark.parametrize("flow", [contextlib.nullcontext, v1_control_flow])
@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_split_if_further_turns_write_zeros_behind_what_is_in_it(
    name: str, flow: Any
) -> None:
    written, is_split = LISTS[name]

    def make(x: tf.Tensor) -> tf.Tensor:
        lengths = tf.cast(x[:, 0], tf.int32)
        made = tf.TensorArray(tf.float32, 4, element_shape=[None])
        _, made = tf.while_loop(
            lambda t, made: t < tf.maximum(1, tf.reduce_max(lengths)),
            lambda t, made: (t + 1, made.write(*written(t, lengths, x[:, 1]))),
            [0, made],
        )
        return made.stack()

    with flow():
        assert _is_split(make) == is_split


@pytest.mark.parametrize("flow", [contextlib.nullcontext, v1_control_flow])
def test_branches_by_lengths_are_not_split(flow: Any) -> None:
    def make(x: tf.Tensor) -> tf.Tensor:
        lengths = tf.cast(x[:, 0], tf.int32)
        return tf.cond(tf.reduce_max(lengths) > 1, lambda: 2 * x, lambda: x)

    with flow():
        assert not _is_split(make)
