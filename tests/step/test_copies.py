# SPDX-License-Identifier: Apache-2.0
"""Handles captured for all replicas at once; tests/graph/cloning is about copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers

VARIABLES = pytest.mark.parametrize("variables", ["mirrored", "sharded"])


@pytest.mark.fast
@VARIABLES
def test_handles_are_there_before_the_second_replica_is_built(variables: str) -> None:
    repl = helpers.make(3, variables=variables, build="trace")
    with repl.context():
        used = [tf.Variable([float(k), 1.0]) for k in range(4)]
    captured = []

    def step_fn() -> tf.Tensor:
        graph: Any = tf.compat.v1.get_default_graph()
        before = len(graph.captures)
        total = tf.add_n([v.read_value() for v in used])
        captured.append((before, len(graph.captures)))
        return repl.all_reduce(total)

    for result in repl.run(step_fn):
        np.testing.assert_array_equal(result, [18.0, 12.0])
    count = len(used) * (3 if variables == "mirrored" else 1)
    first, *later = captured  # one less with build="clone": the last is a copy
    assert first == (0, len(used))
    assert later and set(later) == {(count, count)}


@VARIABLES
@pytest.mark.parametrize("mode", helpers.MODES)
def test_replicas_may_use_other_variables(variables: str, mode: str) -> None:
    """And variables that a later replica uses first, or makes."""
    repl = helpers.make(3, variables=variables)

    def make_step() -> Any:
        with repl.context():
            used = [tf.Variable([10.0 * (k + 1)] * 2) for k in range(3)]

        def step_fn() -> Any:
            value = tf.identity(used[repl.replica_id])
            return value, repl.all_reduce(value)

        return step_fn

    value, total = helpers.run(mode, repl, make_step)
    for r in range(3):
        np.testing.assert_array_equal(value[r], [10.0 * (r + 1)] * 2)
        np.testing.assert_array_equal(total[r], [60.0, 60.0])


@VARIABLES
def test_a_step_in_a_loop_of_the_user_gets_them_too(variables: str) -> None:
    repl = helpers.make(2, variables=variables)
    with repl.context():
        total = tf.Variable([0.0, 0.0])

    @tf.function
    def loop(n: tf.Tensor) -> None:
        for _ in tf.range(n):
            repl.run(lambda: total.assign_add(repl.all_reduce(tf.ones([2]))))

    loop(tf.constant(3))
    np.testing.assert_array_equal(total, [6.0, 6.0])
    helpers.assert_replicas_equal([total])
