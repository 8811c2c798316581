# SPDX-License-Identifier: Apache-2.0
"""What is told of the numbers in shapes is what they are, however many examples."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist.program import Program
from replicator.autodist.sizes import FIXED, GROWS, Element, Sizes, each, grown, which
from replicator.autodist.values import Values
from tests.autodist.helpers import AS_IT_IS
from tests.helpers import opaque

v1 = tf.compat.v1
SQUARE = (2,)
X = np.random.default_rng(1).normal(size=[5, 2, 3])


def _size(x: tf.Tensor) -> tf.Tensor:
    return tf.shape(x)[0]


def _some(x: tf.Tensor) -> tf.Tensor:
    return tf.boolean_mask(x, x[:, 0, 0] > 0)


def _wide(x: tf.Tensor) -> tf.Tensor:  # [n, k], where k is not known, but no n either
    return x[:, 0] @ opaque(np.ones([3, 4]), [3, None])


# Of x [n, 2, 3].
ELEMENTS: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], Any]] = {
    "constants": (lambda x: tf.constant([4, -1]), [4, -1]),
    "a number": (lambda x: tf.constant(4), [4]),
    "a matrix": (lambda x: tf.constant([[4], [5]]), [4, 5]),
    "a fraction": (lambda x: tf.constant([0.5]), None),
    "a shape": (lambda x: tf.shape(x), [GROWS, 2, 3]),
    "shapes": (lambda x: tf.shape_n([x[0], x])[1], [GROWS, 2, 3]),
    "a size that is not known": (lambda x: tf.shape(_wide(x)), [GROWS, FIXED]),
    "that of a part": (lambda x: tf.shape(_some(x)), [None, 2, 3]),
    "that of what mixes examples": (
        lambda x: tf.shape(tf.unique(x[:, 0, 0])[0]),
        [None],
    ),
    "that of unknown rank": (
        lambda x: tf.shape(v1.placeholder_with_default(x, None)),
        None,
    ),
    "passed on": (lambda x: tf.identity(tf.cast(tf.shape(x), tf.int64)), [GROWS, 2, 3]),
    "a size": (_size, [GROWS]),
    "the last size": (lambda x: tf.shape(x)[-1], [3]),
    "all but one": (lambda x: tf.shape(x)[1:], [2, 3]),
    "some, backwards": (lambda x: tf.shape(x)[1::-1], [2, GROWS]),
    "up to one": (lambda x: tf.shape(x)[:-1], [GROWS, 2]),
    "cut": (lambda x: tf.slice(tf.shape(x), [0], [2]), [GROWS, 2]),
    "cut to the end": (lambda x: tf.slice(tf.shape(x), [1], [-1]), [2, 3]),
    "cut by a size": (lambda x: tf.slice(tf.shape(x), [0], [_size(x) * 0]), None),
    "packed": (lambda x: tf.stack([7, _size(x)]), [7, GROWS]),
    "joined": (lambda x: tf.concat([[-1], tf.shape(x)[:2]], 0), [-1, GROWS, 2]),
    "joined with what is not known": (
        lambda x: tf.concat([[-1], tf.cast(x[0, 0], tf.int32)], 0),
        None,
    ),
    "in a vector": (lambda x: tf.reshape(_size(x), [1]), [GROWS]),
    "in a vector, expanded": (lambda x: tf.expand_dims(_size(x), 0), [GROWS]),
    "picked": (lambda x: tf.gather(tf.shape(x), [2, 0]), [3, GROWS]),
    "picked by what is not known": (
        lambda x: tf.gather(tf.shape(x), tf.range(_size(x)) * 0),
        None,
    ),
    "stitched": (
        lambda x: tf.dynamic_stitch([[2, 0], [1]], [tf.shape(x)[:2], [9]]),
        [2, 9, GROWS],
    ),
    "stitched over another": (
        lambda x: tf.dynamic_stitch([[0, 1], [0]], [tf.shape(x)[:2], [9]]),
        [9, 2],
    ),
    # Computed.
    "a product": (lambda x: tf.reduce_prod(tf.shape(x)), [GROWS]),
    "a product of known ones": (lambda x: tf.reduce_prod(tf.shape(x)[1:]), [6]),
    "a product with itself": (lambda x: _size(x) * _size(x), [SQUARE]),
    "times two": (lambda x: 2 * tf.shape(x), [GROWS, 4, 6]),
    "times each": (lambda x: tf.shape(x) * [1, _size(x), 2], [GROWS, GROWS, 6]),
    "times what is not known": (
        lambda x: tf.shape(x)[:1] * tf.shape(_some(x))[:1],
        [None],
    ),
    "over one": (lambda x: _size(x) // 1, [GROWS]),
    "over two": (lambda x: tf.shape(x)[:2] // 2, [None, 1]),
    "over itself": (lambda x: _size(x) // _size(x), [None]),
    "over nothing": (lambda x: tf.shape(x)[1:] // 0, [None, None]),
    "of unknown ones": (
        lambda x: tf.stack([tf.shape(_wide(x))[1] // 2, tf.shape(_wide(x))[1] + 1]),
        [FIXED, FIXED],
    ),
    "one more": (lambda x: tf.shape(x) + 1, [None, 3, 4]),
    "one less": (lambda x: tf.shape(x) - 1, [None, 1, 2]),
    "a remainder": (lambda x: tf.shape(x) % 2, [None, 0, 1]),
    "at least one": (lambda x: tf.maximum(tf.shape(x), 1), [GROWS, 2, 3]),
    "at least four": (lambda x: tf.maximum(tf.shape(x), 4), [None, 4, 4]),
    "at most one": (lambda x: tf.minimum(tf.shape(x), 1), [None, 1, 1]),
    "at most itself": (lambda x: tf.minimum(_size(x), tf.shape(x)[0]), [GROWS]),
    "at least an unknown one": (
        lambda x: tf.maximum(tf.shape(_wide(x)), [1, 2]),
        [GROWS, FIXED],
    ),
    # What rules on values tell.
    "as many as there are": (lambda x: tf.size(x), [GROWS]),
    "a number that is fed": (lambda x: opaque(3), [FIXED]),
    "numbers that are fed": (lambda x: opaque([3, 4]), [FIXED, FIXED]),
    "a sum of examples": (lambda x: tf.cast(tf.reduce_sum(x), tf.int32), None),
    "a matrix of sizes": (
        lambda x: tf.reshape(tf.shape(x)[1:] * _size(x), [1, 2]),
        None,
    ),
}


@contextlib.contextmanager
def _session(
    make: Callable[[tf.Tensor], tf.Tensor],
) -> Iterator[tuple[Callable[[int], Any], list[Element] | None]]:
    """Makes a tensor of x [n, 2, 3], and infers its elements.

    Args:
        make: Returns the tensor, given x.

    Yields:
        A function that returns the tensor's value for n examples, and the elements.
    """
    with tf.Graph().as_default() as graph, v1.Session(config=AS_IT_IS) as session:
        x = v1.placeholder(tf.float64, [None, 2, 3], "x")
        tensor = make(x)
        elements = Sizes(Values(Program(graph, []).flow).of).elements(tensor)
        yield lambda count: session.run(tensor, {x: X[:count]}), elements


def _powers(elements: list[Element] | None) -> Any:
    """Returns elements with nothing but powers of those that are not known."""
    return elements and [e[:1] if isinstance(e, tuple) else e for e in elements]


@pytest.mark.parametrize("name", ELEMENTS)
def test_each_number_is_what_is_told_of_it(name: str) -> None:
    make, expected = ELEMENTS[name]
    with _session(make) as (run, found):
        assert found == expected or _powers(found) == expected
        if found is None or None in found:
            return
        one = run(1)
        for count in (2, 5):
            numbers = run(count)
            for number, first, element in zip(
                np.ravel(numbers), np.ravel(one), found, strict=True
            ):
                if isinstance(element, int):
                    assert number == element
                else:
                    assert number == first * count ** element[0]
                    times = each(element)
                    assert times is None or number == times * count


TIMES: dict[str, tuple[Callable[[tf.Tensor], tf.Tensor], int | None]] = {
    "a size": (_size, 1),
    "all numbers": (tf.size, 6),
    "a product": (lambda x: tf.reduce_prod(tf.shape(x)[:2]), 2),
    "of rows in one": (lambda x: tf.shape(tf.reshape(x, [-1, 3]))[0], 2),
    "of one after another": (
        lambda x: tf.shape(tf.concat([tf.reshape(x, [-1]), x[:, 0, 0]], 0))[0],
        7,
    ),
    "of tiles": (lambda x: tf.shape(tf.tile(x, [3, 1, 1]))[0], 3),
    "times what is not known": (lambda x: _size(x) * opaque(3), None),
    "of rows of an unknown size": (
        lambda x: tf.shape(tf.reshape(_wide(x), [-1]))[0],
        None,
    ),
}


@pytest.mark.parametrize("name", TIMES)
def test_how_many_times_the_examples_a_size_is_may_be_known(name: str) -> None:
    make, times = TIMES[name]
    with _session(make) as (run, elements):
        (element,) = elements or [None]
        assert each(element) == times
        if times is not None:
            assert run(len(X)) == times * len(X)


def test_sizes_are_equal_if_they_are_of_the_same_axis() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float64, [None, 2, 3], "x")
        wide, other = _wide(x), _wide(x)
        across = tf.transpose(tf.tanh(wide) + 1.0)
        sizes = Sizes(Values(Program(graph, []).flow).of)
        own = sizes.of_shape(wide)
        assert own is not None and which(own[0]) is None
        assert which(own[1]) == which((sizes.of_shape(across) or [None])[0])
        assert which(own[1]) != which((sizes.of_shape(other) or [None, None])[1])


@pytest.mark.parametrize(
    ("elements", "place", "is_known"),
    [
        *[([2, GROWS, 3], 1, True), ([2, FIXED], None, True), ([], None, True)],
        *[([GROWS, FIXED], 0, True), ([GROWS, GROWS], None, False)],
        *[([SQUARE, 2], None, False), ([None, GROWS], None, False)],
        (None, None, False),
    ],
)
def test_a_shape_grows_along_one_axis_if_all_of_it_is_known(
    elements: Any, place: int | None, is_known: bool
) -> None:
    assert grown(elements) == (place, is_known)
