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


def _guards(write: tf.Operation, live: list[tf.Operation], fitting: bool = True) -> int:
    level = dict.fromkeys([write, *live], 0)
    return len(guards.add([write], level, [write] if fitting else []))


def _add(variable: tf.Variable, indices: tf.Tensor) -> tf.Operation:
    return tf.raw_ops.ResourceScatterAdd(
        resource=variable.handle, indices=indices, updates=helpers.opaque(1.0)
    )


def _derived(indices: tf.Tensor) -> tf.Tensor:
    """Returns indices as gradients have them."""
    flat = tf.reshape(indices, [-1])
    joint = tf.concat([flat, tf.identity(flat)[:1]], 0)
    return tf.unique(joint)[0]


def test_rows_that_a_step_looks_up_exist() -> None:
    variable, indices = _variable(), helpers.opaque([[0, 4]])
    looked_up = variable.sparse_read(indices)
    write = _add(variable, _derived(indices))
    assert _guards(write, [looked_up.op]) == 0
    assert _guards(write, []) == 1  # the lookup does not run


@pytest.mark.parametrize("offset, exist", [(1, True), (2, False)])
def test_rows_that_are_computed_as_those_of_a_lookup_exist(
    offset: int, exist: bool
) -> None:
    variable, indices = _variable(), helpers.opaque([0, 4, 3])

    def later_rows(offset: int) -> tf.Tensor:
        part = tf.dynamic_partition(indices, tf.cast(indices > 2, tf.int32), 2)[1]
        return part - tf.constant(offset)

    looked_up = variable.sparse_read(later_rows(1))
    write = _add(variable, _derived(later_rows(offset)))
    assert _guards(write, [looked_up.op]) == (0 if exist else 1)
    assert _guards(write, []) == 1


def test_rows_that_are_looked_up_elsewhere_may_not_exist() -> None:
    variable, indices = _variable(), helpers.opaque([0, 4])
    unknown = tf.Variable(tf.zeros([9, 3]), shape=[None, 3])
    in_batches = tf.raw_ops.ResourceGather(
        resource=tf.compat.v1.Variable(tf.zeros([5, 9, 3]), use_resource=True).handle,
        indices=tf.stack([indices] * 5),
        dtype=tf.float32,
        batch_dims=1,
    )
    elsewhere = [v.sparse_read(indices) for v in (_variable(6), unknown)]
    with tf.device("GPU:0"):
        elsewhere.append(variable.sparse_read(indices))
    write = _add(variable, indices)
    assert _guards(write, [x.op for x in (*elsewhere, in_batches)]) == 1


def test_rows_that_are_looked_up_after_a_write_may_not_exist() -> None:
    variable, indices = _variable(), helpers.opaque([0, 4])
    write = _add(variable, indices)
    later = variable.sparse_read(indices).op
    assert len(guards.add([write], {write: 0, later: 1}, [write])) == 1
    assert len(guards.add([write], {write: 1, later: 1}, [write])) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda i: i + 1,
        lambda i: tf.unique(i)[1],
        lambda i: tf.concat([i, helpers.opaque([7])], 0),
        lambda i: tf.gather(i, [0]),
    ],
)
def test_what_is_computed_from_them_may_not_exist(change) -> None:
    variable, indices = _variable(), helpers.opaque([0, 4])
    looked_up = variable.sparse_read(indices)
    assert _guards(_add(variable, change(indices)), [looked_up.op]) == 1


def test_a_gpu_leaves_out_rows_that_do_not_exist() -> None:
    with tf.device("GPU:0"):
        write = _add(_variable(), helpers.opaque([0, 4]))
    assert _guards(write, []) == 0


def test_values_of_a_known_shape_fit() -> None:
    variable = _variable()
    unknown = tf.zeros([helpers.opaque(5), 3])
    assert _guards(variable.assign(tf.ones([5, 3]), read_value=False), []) == 0
    assert _guards(variable.assign(unknown, read_value=False), []) == 1


def test_rows_fit_where_an_optimizer_is_given_them_by_us() -> None:
    variable, indices = _variable(), helpers.opaque([0, 4])
    rows = tf.zeros([helpers.opaque(2), 3])
    looked_up = variable.sparse_read(indices)
    write = tf.raw_ops.ResourceScatterAdd(
        resource=variable.handle, indices=indices, updates=rows
    )
    assert _guards(write, [looked_up.op]) == 0
    assert _guards(write, [looked_up.op], fitting=False) == 1


def test_columns_are_compared_where_they_are_unknown() -> None:
    variable, indices = _variable(), helpers.opaque([0, 4])
    looked_up = variable.sparse_read(indices)
    write = tf.raw_ops.ResourceScatterAdd(
        resource=variable.handle,
        indices=indices,
        updates=tf.zeros([2, helpers.opaque(3)]),
    )
    assert _guards(write, [looked_up.op]) == 1


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
    guarding = guards.add([write], {write: 0}, [])
    with tf.compat.v1.Session(graph=graph) as session:
        if fits:
            session.run(guarding)
            return
        with pytest.raises(tf.errors.InvalidArgumentError, match="shape differs"):
            session.run(guarding)


@pytest.mark.parametrize("index", [-1, 0, 4, 5])
def test_a_guard_fails_if_there_is_no_such_row(index: int) -> None:
    write = _add(_variable(rows=5), helpers.opaque([index]))
    (guard,) = guards.add([write], {write: 0}, [write])
    with tf.compat.v1.Session() as session:
        if 0 <= index < 5:
            session.run(guard)
            return
        with pytest.raises(
            tf.errors.InvalidArgumentError, match="rows that do not exi"
        ):
            session.run(guard)
