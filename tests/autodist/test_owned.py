# SPDX-License-Identifier: Apache-2.0
"""Ops that run on one replica only are in the graph once, however many there are."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests.autodist.test_session import scope

v1 = tf.compat.v1
_ONCE = ("ResourceApplyMomentum", "AssignVariableOp", "VarIsInitializedOp")


def _program(factor=None):
    """Returns x, a variable, its training op, and the initializer of all variables."""
    x = v1.placeholder(tf.float32, [None, 2], "x")
    w = tf.Variable([[1.0], [2.0]], name="w")
    loss = tf.reduce_mean(tf.matmul(x, w))
    optimizer = v1.train.MomentumOptimizer(0.5, 0.0)
    grads = optimizer.compute_gradients(loss)
    if factor is not None:
        grads = [(g * factor(), v) for g, v in grads]
    return x, w, optimizer.apply_gradients(grads), v1.global_variables_initializer()


def _count(num_replicas):
    """Returns the number of ops of each type for a number of replicas."""
    with scope(num_replicas, "sharded") as autodist:
        _program()
        session = autodist.create_distributed_session()
        ops = session._replicas.graph.get_operations()
        reads = [op for op in ops if op.type == "ReadVariableOp"]
        unread = {op for op in reads if not op.outputs[0].consumers()}
        return collections.Counter(op.type for op in set(ops) - unread), len(unread)


def test_updates_and_initializers_are_there_once():
    (two, unread), (five, still_unread) = _count(2), _count(5)
    assert {t: two[t] for t in _ONCE} == {t: five[t] for t in _ONCE}
    assert two["ResourceApplyMomentum"] == 1 and two["AssignVariableOp"] > 1
    assert unread == still_unread
    assert five["ReadVariableOp"] == 5 and two["ReadVariableOp"] == 2


def test_each_can_be_fetched_and_waited_for():
    with scope(3, "sharded") as autodist:
        x, w, train, init = _program()
        asked = tf.identity(w.is_initialized())
        late = w.is_initialized()
        session = autodist.create_distributed_session()
        for _ in range(2):
            session.run(train, {x: np.ones([6, 2])})
            np.testing.assert_allclose(session.run(w), [[0.5], [1.5]])
            session.run(init)
            np.testing.assert_allclose(session.run(w), [[1.0], [2.0]])
        session.run(w.initializer)
        assert session.run([asked, late]) == [True, True]
        read = w.op.graph.get_tensor_by_name("w/Read/ReadVariableOp:0")
        np.testing.assert_allclose(session.run(read), [[1.0], [2.0]])


def test_updates_by_what_may_differ_are_compared_as_before():
    def now():
        return tf.cast(tf.timestamp(), tf.float32)

    with scope(2, "sharded") as autodist:
        _program(now)
        with pytest.raises(errors.ReplicatorError, match="w"):
            autodist.create_distributed_session()
