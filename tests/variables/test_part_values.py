# SPDX-License-Identifier: Apache-2.0
"""The value of a variable after a write to a part of it."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.variables import part_values
from tests import helpers

VALUE = np.arange(12, dtype=np.float32).reshape(4, 3)


class _Variable:
    """A plain variable."""

    def __init__(self) -> None:
        self.plain = tf.Variable(VALUE)

    def read_value(self) -> tf.Tensor:
        return self.plain.read_value()


@pytest.mark.parametrize("method", ["scatter_mul", "scatter_div"])
def test_what_has_no_counterpart_needs_components(method: str) -> None:
    repl = helpers.make(2, variables="sharded", build="trace")
    with repl.context():
        v = tf.Variable(VALUE)
    assert v.owner is not None
    rows = tf.IndexedSlices(tf.constant([[2.0, 4.0, 8.0]]), tf.constant([1]))
    repl.run(lambda: [getattr(v, method)(rows), None][1])
    expected = VALUE.copy()
    expected[1] = getattr(
        np, {"scatter_mul": "multiply", "scatter_div": "divide"}[method]
    )(expected[1], [2.0, 4.0, 8.0])
    np.testing.assert_array_equal(helpers.components(v), [expected] * 2)
    (note,) = repl.plan.notes
    assert (
        f"Not sharded, as written by {method}" in note and "test_part_values.py" in note
    )


@pytest.mark.parametrize("mode", ["function", "session"])
def test_rows_on_which_replicas_do_not_agree_are_not_written(mode: str) -> None:
    """Even where the components cannot be repaired after the error."""
    repl = helpers.make(2, check=True, variables="mirrored", build="trace")
    with tf.Graph().as_default() if mode == "session" else contextlib.nullcontext():
        with repl.context():
            v = tf.Variable([1, 2, 3])

        def step() -> None:
            v.scatter_add(tf.IndexedSlices([5], [repl.replica_id]))

        if mode == "session":
            result = repl.run(lambda: (step(), tf.constant(0))[1])
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                with pytest.raises(tf.errors.InvalidArgumentError, match="different"):
                    session.run(result)
                values = session.run([c.read_value() for c in v.components])
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match="different"):
                tf.function(lambda: repl.run(step))()
            values = helpers.components(v)
    assert [list(value) for value in values] == [[1, 2, 3], [1, 2, 3]]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        (
            "scatter_update",
            (tf.IndexedSlices(tf.ones([1, 3], tf.int32), tf.constant([2])),),
        ),
        ("scatter_nd_add", ([[1, 2]], tf.ones([1], tf.int32))),
    ],
)
def test_values_of_another_dtype_are_refused(
    method: str, arguments: tuple[Any, ...]
) -> None:
    """Even in a function, where TensorFlow captures eager tensors without a cast."""
    variable = _Variable()
    for write in (
        part_values.written,
        tf.function(part_values.written, autograph=False),
    ):
        with pytest.raises(errors.ArgumentError, match="values of int32.*float32"):
            write(variable, method, *arguments)
