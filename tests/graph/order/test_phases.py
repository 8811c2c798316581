# SPDX-License-Identifier: Apache-2.0
"""The edges that order ops that can fail before writes, and the omitted ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf

from replicator.graph.order import phases
from tests import helpers


@pytest.fixture(autouse=True)
def graph() -> Iterator[tf.Graph]:
    with tf.Graph().as_default() as graph:
        yield graph


def _variables(count: int) -> list[tf.Variable]:
    ops = []
    for r in range(count):
        with tf.device(f"CPU:{r}"):
            ops.append(tf.compat.v1.Variable(0.0, use_resource=True))
    return ops


def _add(variable: tf.Variable, value: tf.Tensor) -> tf.Operation:
    with tf.device(variable.device):
        return variable.assign_add(value, read_value=False)


def _gather(device: int, source: tf.Tensor | float = 0.0) -> tf.Tensor:
    """Returns the result of an op that can fail."""
    with tf.device(f"CPU:{device}"):
        return tf.gather([source, 1.0], helpers.opaque(0))


def test_all_writes_of_all_replicas_wait_for_all_that_can_fail() -> None:
    one, two = _variables(2)
    failing = [_gather(0), _gather(1)]
    writes = [_add(one, failing[0]), _add(two, tf.ones([]))]
    phases.separate([*writes, *(t.op for t in failing)], set())
    for write in writes:
        assert {t.op for t in failing} <= set(helpers.ops_run(write))


def test_a_write_that_depends_on_all_that_can_fail_gets_no_edge() -> None:
    one, two = _variables(2)
    total = _gather(0) + _gather(1)
    writes = [_add(one, total), _add(two, total)]
    phases.separate(writes, set())
    assert not any(write.control_inputs for write in writes)


def test_another_write_waits_for_one_op_of_its_device() -> None:
    one, two = _variables(2)
    total = _gather(0) + _gather(1)
    with tf.device("CPU:1"):
        here = tf.negative(total)
    writes = [_add(v, tf.ones([])) for v in (one, one, two)]
    phases.separate([*writes, here.op], set())
    (gate,), (same,), (last,) = (write.control_inputs for write in writes)
    assert gate is same and last is here.op
    assert gate.device == writes[0].device


def test_writes_wait_for_no_writes_where_nothing_behind_these_can_fail() -> None:
    """Gradients are applied, and freed, one by one."""
    one, two = _variables(2)
    writes = [_add(one, _gather(0)), _add(two, _gather(1))]
    with tf.control_dependencies([writes[0]]):
        later = _add(two, tf.sqrt(one.read_value()))
    phases.separate([*writes, later], set())
    assert writes[1] not in helpers.ops_run(later)


def test_what_can_fail_behind_a_write_waits_for_the_writes_of_all_replicas() -> None:
    one, two = _variables(2)
    writes = [_add(one, tf.ones([])), _add(two, tf.ones([]))]
    with tf.control_dependencies([writes[0]]):
        later = _gather(0, one.read_value())
    phases.separate([*writes, later.op], set())
    assert set(writes) <= set(helpers.ops_run(later))
    assert not any(later.op in helpers.ops_run(write) for write in writes)


def test_one_result_of_a_call_stands_for_no_other() -> None:
    (one,) = _variables(1)

    @tf.function(autograph=False)
    def two(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.ones([]), tf.gather([0.0], index)

    with tf.device("CPU:0"):
        safe, unsafe = two(helpers.opaque(0))
    write = _add(one, safe)
    phases.separate([write, unsafe.op], set())
    users = {t for op in helpers.ops_run(write) for t in map(id, op.inputs)}
    assert {id(safe), id(unsafe)} <= users
