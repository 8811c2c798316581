# SPDX-License-Identifier: Apache-2.0
"""The state after an eager step that was interrupted during its writes."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator.step import repair
from tests import helpers


def _variables(**options: Any) -> tuple[Any, Any]:
    with helpers.make(3, variables="mirrored").context():
        mirrored = tf.Variable([1, 2])
        on_read = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    return mirrored, on_read


@pytest.mark.parametrize("error", [tf.errors.ResourceExhaustedError, None])
def test_components_are_equal_after_an_error_amid_the_writes(error) -> None:
    mirrored, own = _variables()
    both = [c for v in (mirrored, own) for c in v.components]
    owners = {
        id(c.handle): v
        for v, components in ((mirrored, both[:3]), (own, both[3:]))
        for c in components
    }

    def run() -> None:
        mirrored.components[0].assign([5, 6])
        own.components[1].assign(7.0)
        raise (error or tf.errors.OutOfRangeError)(None, None, "stopped")

    actual = repair.mirrored([c.handle for c in both], owners)
    with pytest.raises(error or tf.errors.OutOfRangeError, match="stopped"):
        repair.equal_after_errors(run, actual)()
    rest = [5, 6] if error else [1, 2]
    values = [list(c) for c in helpers.components(mirrored)]
    assert values == [[5, 6], rest, rest]
    assert helpers.components(own) == [0.0, 7.0, 0.0]


def test_a_step_that_writes_rows_that_do_not_exist_leaves_replicas_equal() -> None:
    repl = helpers.make(2, variables="mirrored")
    with repl.context():
        table, count = tf.Variable(tf.zeros([3, 2])), tf.Variable(0)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        optimizer.build([table])
    row = tf.Variable(7)

    def step() -> None:
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.reshape(row, [1]), [3, 2])
        optimizer.apply_gradients([(rows, table)])
        count.assign_add(1)

    for _ in range(5):
        with pytest.raises(tf.errors.InvalidArgumentError):
            repl.run(step)
        helpers.assert_replicas_equal([table, count, *optimizer.variables])
    row.assign(1)
    repl.run(step)
    assert table.numpy().tolist() == [[0, 0], [-1, -1], [0, 0]]
