"""Gradients of convolutions made by convolutions, against TensorFlow's own kernels."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from replicator.graph import convolutions


def _gradients(
    x: Any,
    filters: Any,
    padding: Any = "SAME",
    strides: int = 1,
    dilations: int = 1,
    data_format: str = "NHWC",
) -> tuple[tf.Operation, tf.Operation]:
    """Returns the gradients of a convolution by its input and by its filter, as ops.

    Args:
        x: Examples, or their shape, for a placeholder.
        filters: Likewise.
        padding: Of the convolution, as are the others.
        strides: In both directions.
        dilations: In both directions.
        data_format: Where the channels stand.
    """
    x, filters = (
        tf.compat.v1.placeholder("float32", it) if isinstance(it, tuple) else it
        for it in (x, filters)
    )
    y = tf.nn.conv2d(x, filters, strides, padding, data_format, dilations)
    dy = tf.random.stateless_normal(tf.shape(y), [1, 2], dtype=y.dtype)
    dy = tf.ensure_shape(dy, y.shape)
    by_input, by_filter = tf.gradients(y, [x, filters], dy)
    ops = {op.type: op for op in by_input.graph.get_operations()}
    return ops["Conv2DBackpropInput"], ops["Conv2DBackpropFilter"]


@st.composite
def _convolutions(draw: st.DrawFn) -> dict[str, Any]:
    sizes = st.integers(1, 5)
    filters = [draw(sizes), draw(sizes)]
    image = [draw(st.integers(size, 7)) for size in filters]
    amount = [[draw(st.integers(0, size - 1)) for _ in "ab"] for size in filters]
    paddings = ["SAME", "VALID", [[0, 0], *amount, [0, 0]]]
    return {
        "x": [draw(sizes), *image, channels := draw(sizes)],
        "filters": [*filters, channels, draw(sizes)],
        "padding": draw(st.sampled_from(paddings)),
    }


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(_convolutions())
def test_they_are_the_kernels_results(drawn: dict[str, Any]) -> None:
    @tf.function
    def both() -> list[tuple[tf.Tensor, tf.Tensor]]:
        x = tf.random.stateless_normal(drawn["x"], [3, 4], dtype=tf.float64)
        filters = tf.random.stateless_normal(drawn["filters"], [5, 6], dtype=tf.float64)
        by_input, by_filter = _gradients(x, filters, drawn["padding"])
        return [
            (convolutions.by_input(by_input), by_input.outputs[0]),
            (convolutions.by_filter(by_filter), by_filter.outputs[0]),
        ]

    for ours, theirs in both():
        np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-10)


def _pay(*args: Any, **kwargs: Any) -> tuple[bool, bool]:
    """Returns whether to make the gradients by the input, and by the filter."""
    with tf.Graph().as_default():
        by_input, by_filter = _gradients(*args, **kwargs)
        return (
            convolutions.pays_by_input(by_input),
            convolutions.pays_by_filter(by_filter),
        )


@pytest.mark.parametrize(
    "shapes, pay",
    [
        ([(32, 32, 32, 16), (3, 3, 16, 16)], (True, True)),
        ([(8, 14, 14, 256), (5, 5, 256, 256)], (True, True)),
        ([(32, 28, 28, 1), (5, 5, 1, 32)], (False, True)),
        ([(None, 32, 32, 16), (3, 3, 16, 16)], (True, False)),
        ([(1, 32, 32, 16), (3, 3, 16, 16)], (True, False)),
        ([(8, 112, 112, 32), (3, 3, 32, 32)], (True, False)),
        ([(8, 8, 8, 16), (3, 3, 16, 256)], (False, True)),
        ([(64, 8, 8, 8), (3, 3, 8, 8)], (False, False)),
        ([(8, 56, 56, 64), (1, 1, 64, 256)], (False, False)),
        ([(8, 32, 32, 16), (3, 3, 16, None)], (False, False)),
    ],
    ids=str,
)
def test_where_it_pays(shapes: list[Any], pay: tuple[bool, bool]) -> None:
    assert _pay(*shapes) == pay


@pytest.mark.parametrize("arguments", [{"strides": 2}, {"dilations": 2}], ids=str)
def test_others_are_left_alone(arguments: dict[str, int]) -> None:
    shapes = (32, 32, 32, 16), (3, 3, 16, 16)
    assert _pay(*shapes, **arguments) == (False, False)


def test_channels_that_come_first_are_left_alone() -> None:
    shapes = (32, 16, 32, 32), (3, 3, 16, 16)
    assert _pay(*shapes, data_format="NCHW") == (False, False)
