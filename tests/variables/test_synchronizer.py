# SPDX-License-Identifier: Apache-2.0
"""Each variable's gradient is lowered by its synchronizer, to the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.strategy import AllReduceSynchronizer
from tests import helpers

VALUE = np.arange(6, dtype=np.float32).reshape(2, 3)


def _trained(
    synchronizers: Sequence[AllReduceSynchronizer | None], variables: str, steps: int
) -> Any:
    repl = helpers.make(3, variables=variables)
    with repl.context():
        values = [tf.Variable(VALUE + k) for k in range(len(synchronizers))]
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.SGD(0.5), accumulation_steps=steps
        )
    for v, synchronizer in zip(values, synchronizers, strict=True):
        helpers.synchronize(v, synchronizer)

    def step_fn() -> Any:
        gradients = [tf.cast(repl.replica_id, tf.float32) * v for v in values]
        optimizer.apply_gradients(zip(gradients, values, strict=True))
        values[0].assign_add(tf.fill([2, 3], float(repl.replica_id)))

    for _ in range(2 * steps):
        repl.run(step_fn)
    helpers.assert_replicas_equal(values)
    return [v.numpy() for v in values], repl.plan


@pytest.mark.battery(5)
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
@pytest.mark.parametrize("steps", [1, 2])
def test_synchronizers_change_no_value(variables: str, steps: int) -> None:
    chosen = [
        AllReduceSynchronizer("RING"),
        AllReduceSynchronizer(group=1),
        None,
        AllReduceSynchronizer(),
    ]
    values, plan = _trained(chosen, variables, steps)
    expected, _ = _trained([None] * 4, variables, steps)
    np.testing.assert_array_equal(values, expected)
    if variables == "mirrored" and steps == 1:
        gradients, assigned = plan
        assert sorted(gradients.algorithm.split(", ")) == ["hub", "ring"]
        assert assigned.algorithm == "ring"  # assignments use the same algorithm
