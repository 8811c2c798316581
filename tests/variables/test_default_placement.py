# SPDX-License-Identifier: Apache-2.0
"""Each value of the option `variables` trains as one device does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.variables import default_placement
from replicator.world import World
from tests import helpers


def _trained(count: int, variables: str) -> list[Any]:
    repl = helpers.make(count, variables=variables)
    with repl.context():
        made = [tf.Variable([[1.0, 2.0]]), tf.Variable([3.0]), tf.Variable(4.0)]
        steps = tf.Variable(0)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.1))

    def step_fn() -> None:
        with tf.GradientTape() as tape:
            loss = made[2] * tf.reduce_sum(made[0] ** 2) + tf.reduce_sum(made[1] ** 2)
        optimizer.apply(tape.gradient(loss, made), made)
        steps.assign_add(1)

    for _ in range(3):
        repl.run(step_fn)
    helpers.assert_replicas_equal([*made, steps])
    return [v.numpy() for v in (*made, steps)]


@pytest.mark.parametrize("variables", default_placement.VARIABLES)
def test_each_value_trains_as_one_device(variables: str) -> None:
    expected = _trained(1, "mirrored")
    for own, other in zip(_trained(3, variables), expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6)


@pytest.mark.parametrize(
    ("variables", "devices", "expected"),
    [
        ("mirrored", ["/device:CPU:0", "/device:CPU:1"], False),
        ("sharded", ["/device:GPU:0", "/device:GPU:1"], True),
        ("auto", ["/device:CPU:0", "/device:CPU:1"], True),
        ("auto", ["/device:GPU:0", "/device:GPU:1"], False),
        ("auto", ["/job:a/task:0/device:CPU:0", "/job:a/task:1/device:CPU:0"], False),
    ],
)
def test_variables_have_owners_where_reading_is_free(
    variables: str, devices: list[str], expected: bool
) -> None:
    rule = default_placement.rule(variables, World.single_process(devices))
    assert (rule.placement(lambda: tf.ones([2])).owner == 0) is expected


def test_vectors_follow_and_scalars_have_no_owner() -> None:
    loads = default_placement.Loads("ab")
    owners = [loads.shard(rank, nbytes) for rank, nbytes in ((2, 9), (1, 1), (0, 4))]
    assert owners == ["a", "a", None]
    assert [loads.shard(2, 4) for _ in range(3)] == ["b", "b", "b"]
    assert loads.shard(None, 8) is None
    assert loads.lowest() == "a"
