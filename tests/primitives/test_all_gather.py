# SPDX-License-Identifier: Apache-2.0
"""all_gather and gather: parts of no rows, and sizes that differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers


@pytest.mark.parametrize("static", [(), [None, None], None], ids=str)
@pytest.mark.parametrize("name", ["all_gather", "gather"])
def test_all_parts_may_be_empty(name: str, static: Any) -> None:
    repl = helpers.make(2)

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        x = helpers.opaque(np.zeros([2, 0]), static)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = getattr(repl, name)(x, axis=-1)
            y = tf.zeros([0, 2], tf.float64) if y is None else y
            loss = repl.linked(tf.reduce_sum(y))
        return y, tape.gradient(loss, x)

    for column in repl.run(step):
        assert column[0].shape == (2, 0)


@pytest.mark.parametrize("axis", [2, -3])
def test_an_axis_that_turns_out_not_to_exist_is_an_error(axis: int) -> None:
    repl = helpers.make(2)
    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(lambda: repl.all_gather(helpers.opaque([[1.0]], None), axis))


@pytest.mark.parametrize(
    ("shapes", "fix"),
    [
        (([1], [2]), "Fix: pass axis=0, along which sizes may differ; or make the"),
        (([3, 1], [3, 2]), "Fix: pass axis=1, along which sizes may differ; or make"),
        (([1, 2], [2, 1]), "Fix: make the calls the same on all replicas."),
        (([1], [1, 1]), "Fix: make the calls the same on all replicas."),
    ],
)
@pytest.mark.parametrize("name", ["all_gather", "gather"])
def test_the_way_out_of_different_sizes_is_an_axis(
    name: str, shapes: Any, fix: str
) -> None:
    repl = helpers.make(2)

    def step() -> None:
        getattr(repl, name)(tf.ones(shapes[repl.replica_id]))

    with pytest.raises(
        errors.MismatchError, match=f"not the same shape.*\n.*\n.*\n{fix}"
    ):
        repl.run(step)
