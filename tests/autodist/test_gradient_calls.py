# SPDX-License-Identifier: Apache-2.0
"""The gradients that a graph takes, and their targets: one tape may take several."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import gradient_calls
from replicator.autodist.program import Program
from tests.autodist import helpers
from tests.autodist.test_session import scope

v1 = tf.compat.v1
X = np.arange(6, dtype=np.float32).reshape(3, 2) / 3


def _build() -> tuple[tf.Tensor, list[tf.Variable], tf.Operation]:
    """Returns the placeholder, the variables, and the updates of both by one tape."""
    x = v1.placeholder(tf.float32, [None, 2])
    v, w = tf.Variable([[0.3], [0.7]], name="v"), tf.Variable([0.5, 0.2], name="w")
    with tf.GradientTape(persistent=True) as tape:
        rows = tf.tanh(tf.matmul(x, v)) * tf.reduce_sum(w**2)
        loss = tf.reduce_mean(rows)
    updates = [one.assign_sub(tape.gradient(loss, one)) for one in (v, w)]
    return x, [v, w], tf.group(updates)


def test_each_call_of_a_tape_is_told_by_where_it_starts() -> None:
    with scope(2) as autodist:
        _build()
        program = Program(v1.get_default_graph(), autodist._scope.variables)
    assert len(gradient_calls.begun_by_tapes(program.markers)) == 2
    groups = gradient_calls.grouped(program.markers)
    assert {one.variable for group in groups for one in group} == {"v", "w"}


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_gradients_of_one_loss_may_be_taken_several_times(num_replicas: int) -> None:
    results = []
    for autodist in (helpers.make(num_replicas), None):
        with tf.Graph().as_default(), contextlib.ExitStack() as stack:
            if autodist is not None:
                stack.enter_context(autodist.scope())
            x, variables, train = _build()
            if autodist is not None:
                session = autodist.create_distributed_session()
            else:
                session = v1.Session()
                session.run(v1.global_variables_initializer())
            session.run(train, {x: X})
            results.append(session.run(variables))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
