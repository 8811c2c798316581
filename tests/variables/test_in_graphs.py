# SPDX-License-Identifier: Apache-2.0
"""Variables in a tf.Graph: sessions that initialized them before a step was built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf

from replicator import strategy
from tests import helpers

INITIAL = np.arange(6, dtype=np.float32).reshape(3, 2)


def _scaled(repl: Any) -> tuple[Any, Callable[[], Any]]:
    """Returns a variable that one replica owns, and a write that needs one of each."""
    with repl.context():
        v = tf.Variable(INITIAL)
    return v, lambda: v.scatter_mul(tf.IndexedSlices([[2.0, 2.0]], [1])).read_value()


def _looked_up(repl: Any) -> tuple[Any, Callable[[], Any]]:
    """Returns a variable that a strategy divides, as its gradients are sparse."""
    with repl.context():
        v = tf.Variable(INITIAL)
    optimizer = repl.wrap_optimizer(snt.optimizers.SGD(1.0))

    def step_fn() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = -tf.reduce_sum(tf.gather(v, [1]) * INITIAL[1])
        optimizer.apply([tape.gradient(loss, v)], [v])
        return v.read_value()

    return v, step_fn


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({"variables": "sharded"}, _scaled),
        ({"strategy": strategy.RandomAxisPartitionAR()}, _looked_up),
        ({"strategy": strategy.PartitionedPS()}, _scaled),
    ],
    ids=["components", "divided", "parts"],
)
@pytest.mark.parametrize("in_function", [False, True])
def test_a_session_that_initialized_variables_before_a_step_is_built_is_told_so(
    options: dict[str, Any],
    make: Callable[[Any], tuple[Any, Callable[[], Any]]],
    in_function: bool,
) -> None:
    repl = helpers.make(2, **options)
    with tf.Graph().as_default():
        v, step_fn = make(repl)
        initializer = tf.compat.v1.global_variables_initializer()
        with helpers.session() as session:
            session.run(initializer)
            run = tf.function(repl.run) if in_function else repl.run
            results = list(run(step_fn))
            with pytest.raises(
                tf.errors.InvalidArgumentError,
                match=r"(?s)gave new components to variables \(Variable.*this session "
                r"has not initialized.*at .*test_in_graphs.py.*Fix: build the step",
            ):
                session.run(results)
        with helpers.session() as session:
            session.run(initializer)
            expected = INITIAL * [[1], [2], [1]]
            np.testing.assert_array_equal(session.run(results), [expected] * 2)
            np.testing.assert_array_equal(session.run(v), expected)
