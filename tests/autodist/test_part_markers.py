# SPDX-License-Identifier: Apache-2.0
"""A partitioned variable's gradient consists of its parts', and is marked as such."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import marked
from replicator.autodist.shares import Gradient
from tests.autodist import parts

v1 = tf.compat.v1
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def _dense(w: Any) -> Any:
    return tf.gradients(tf.reduce_mean(tf.matmul(X, w) ** 2), [w])


def _sparse(w: Any) -> Any:
    (rows,) = tf.gradients(tf.reduce_mean(tf.gather(w, [3, 0, 3, 1]) ** 2), [w])
    return tf.math.unsorted_segment_sum(rows.values, rows.indices, 4)


def _gradients(made: parts.Made) -> list[Gradient]:
    ops = tuple(made.program.markers)
    return made.divided.gradients(Gradient("w", ops))


@pytest.mark.parametrize("cut", parts.CUTS)
@pytest.mark.parametrize("build", [_dense, _sparse])
def test_gradients_of_parts_are_parts_of_the_gradient(build: Any, cut: str) -> None:
    graphs = parts.divide(build, own := parts.CUTS[cut])
    parts.check(graphs)
    actual = _gradients(graphs)
    assert [one.variable for one in actual] == list(own.names)
    sizes = [len(one.ops) for one in actual]
    assert sizes == ([1, 1] if build is _dense else [2, 2])
    graph = graphs.divided.program.graph
    with v1.Session(graph=graph) as session:
        variables = graphs.divided.program.variables.values()
        session.run([one.initializer for one in variables])
        values = session.run([[op.outputs[0] for op in one.ops] for one in actual])
    (whole,) = graphs.run(False)
    expected = np.split(whole, np.cumsum(own.sizes)[:-1], own.axis)
    for k, (value, part) in enumerate(zip(values, expected, strict=True)):
        if build is _dense:
            (value,) = value
        else:
            rows, indices = value
            value = np.zeros(own.shape_of(k), np.float32)
            np.add.at(value, indices, rows)
        np.testing.assert_allclose(value, part, rtol=1e-6)


@pytest.mark.parametrize("build", [_dense, _sparse])
def test_markers_of_parts_say_what_those_of_the_whole_do(build: Any) -> None:
    graphs = parts.divide(build)
    for one in _gradients(graphs):
        for op, old in zip(one.ops, graphs.program.markers, strict=True):
            assert marked.text(op, marked.GRADIENT) == one.variable
            for name in (marked.TAKEN, marked.LOSS, marked.PART):
                assert marked.text(op, name) == marked.text(old, name)


def test_gradients_of_what_is_whole_are_those_that_there_are() -> None:
    def build(w: Any) -> Any:
        b = tf.Variable([1.0, 2.0], name="b")
        return tf.gradients(tf.reduce_sum(w * b), [b])

    graphs = parts.divide(build)
    (marker,) = graphs.program.markers
    (actual,) = graphs.divided.gradients(Gradient("b", (marker,)))
    assert actual == Gradient("b", (graphs.divided.places[marker],))
