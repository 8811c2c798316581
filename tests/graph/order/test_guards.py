# SPDX-License-Identifier: Apache-2.0
"""The writes that get a guard; tests/test_failures.py shows the guards' purpose."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

from replicator.graph.order import guards
from tests import helpers


@pytest.fixture(autouse=True)
def graph() -> Iterator[tf.Graph]:
    with tf.Graph().as_default() as graph, tf.device("CPU:0"):
        yield graph


def _variable(rows: int = 5) -> tf.Variable:
    return tf.compat.v1.Variable(tf.zeros([rows, 3]), use_resource=True)


def _guards(write: tf.Operation) -> int:
    return len(guards.add([write]))


def _add(variable: tf.Variable, indices: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterAdd(
        resource=variable.handle, indices=indices, updates=helpers.opaque(1.0)
    )


def test_a_gpu_leaves_out_rows_that_do_not_exist() -> None:
    with tf.device("GPU:0"):
        write = _add(_variable(), helpers.opaque([0, 4]))
    assert _guards(write) == 0


def test_values_of_a_known_shape_fit() -> None:
    variable = _variable()
    unknown = tf.zeros([helpers.opaque(5), 3])
    assert _guards(variable.assign(tf.ones([5, 3]), read_value=False)) == 0
    assert _guards(variable.assign(unknown, read_value=False)) == 1


@pytest.mark.parametrize("rows, columns", [(2, None), (None, 3)])
def test_rows_are_compared_where_their_shape_is_unknown(rows, columns) -> None:
    """But for their number where an optimizer is given them by us."""
    updates = tf.zeros([2, 3])
    write = tf.raw_ops.ResourceScatterAdd(
        resource=_variable().handle,
        indices=helpers.opaque([0, 4]),
        updates=helpers.opaque(updates, shape=[rows, columns]),
    )
    assert _guards(write) == 2  # and one that asks whether the rows exist
    assert len(guards.add([write], [write])) == (2 if columns is None else 1)


@pytest.mark.parametrize(
    "shape, value, fits",
    [
        ([2, 2], [2, 2], True),
        ([2, 2], [2], False),
        ([2], [2, 2], False),
        ([2, 3], [3, 2], False),
        ([], [], True),
        ([], [3], False),
        ([], [1], False),
    ],
)
def test_a_guard_compares_whole_shapes(
    graph: tf.Graph, shape: list[int], value: list[int], fits: bool
) -> None:
    variable = tf.compat.v1.Variable(tf.zeros(shape), use_resource=True)
    unknown = helpers.opaque(tf.ones(value), shape=None)
    write = tf.raw_ops.AssignVariableOp(resource=variable.handle, value=unknown)
    _check_guard(graph, write, fits)


@pytest.mark.parametrize(
    "value, fits",
    [([2, 3], True), ([], True), ([3], False), ([1, 3], False), ([2, 2], False)],
)
def test_a_guard_lets_one_number_be_written_to_rows(
    graph: tf.Graph, value: list[int], fits: bool
) -> None:
    write = tf.raw_ops.ResourceScatterAdd(
        resource=_variable().handle,
        indices=tf.constant([0, 4]),
        updates=helpers.opaque(tf.ones(value), shape=None),
    )
    _check_guard(graph, write, fits)


def _check_guard(graph: tf.Graph, write: tf.Operation, fits: bool) -> None:
    guarding = guards.add([write])
    with tf.compat.v1.Session(graph=graph) as session:
        if fits:
            session.run(guarding)
            return
        with pytest.raises(tf.errors.InvalidArgumentError, match="shape differs"):
            session.run(guarding)


@pytest.mark.parametrize("index", [-1, 0, 4, 5])
def test_a_guard_fails_if_there_is_no_such_row(index: int) -> None:
    write = _add(_variable(rows=5), helpers.opaque([index]))
    (guard,) = guards.add([write])
    with tf.compat.v1.Session() as session:
        if 0 <= index < 5:
            session.run(guard)
            return
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="rows that do not exi"
        ):
            session.run(guard)
