# SPDX-License-Identifier: Apache-2.0
"""Feeds are arrays of the placeholders' dtypes, and which are split depends on all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import elements

v1 = tf.compat.v1
X = np.arange(14.0).reshape(7, 2)


def _graph(**shapes: Any) -> tf.Graph:
    """Returns a graph of placeholders of some names, shapes and dtypes."""
    with tf.Graph().as_default() as graph:
        for name, (dtype, shape) in shapes.items():
            v1.placeholder(dtype, shape, name)
    return graph


def _examples() -> tf.Graph:
    return _graph(
        x=(tf.float32, [None, 2]),
        y=(tf.int32, None),
        rate=(tf.float64, []),
        fixed=(tf.float32, [4]),
    )


def test_values_are_arrays_of_the_placeholders_dtypes_in_the_order_of_names(behavior):
    graph = _examples()
    x = graph.get_tensor_by_name("x:0")
    read = elements.fed(graph, {"y:0": [1, 2], x: X.tolist(), "rate:0": 3})
    assert [tensor.name for tensor, _ in read] == ["rate:0", "x:0", "y:0"]
    assert [array.dtype for _, array in read] == [np.float64, np.float32, np.int32]
    np.testing.assert_array_equal(read[1][1], X)
    assert elements.fed(graph, None) == elements.fed(graph, {}) == []


@pytest.mark.parametrize(
    "lengths, few, expected",
    [
        ((4, 4), 2, (0, 0)),
        ((4, 5), 2, (0, 1)),
        ((1, 4), 2, (None, None)),
        ((0, 0), 2, (None, None)),
        ((1, 1), 1, (0, 0)),
        ((2, 2), 3, (None, None)),
    ],
)
def test_equally_long_batches_are_split_alike(lengths, few, expected):
    graph = _graph(a=(tf.float32, [None]), b=(tf.float32, [None, 1]))
    a, b = lengths
    fed = elements.fed(graph, {"a:0": np.ones(a), "b:0": np.ones([b, 1])})
    assert elements.pattern(fed, few) == expected


def test_only_a_first_size_that_is_unknown_is_split():
    graph = _examples()
    given = {"x:0": X[:4], "y:0": [1, 2, 3, 4], "rate:0": 0.5, "fixed:0": np.ones(4)}
    fed = elements.fed(graph, given)
    which = dict(zip(sorted(given), elements.pattern(fed, 2), strict=True))
    assert which == {"fixed:0": None, "rate:0": None, "x:0": 0, "y:0": None}
