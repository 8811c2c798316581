# SPDX-License-Identifier: Apache-2.0
"""In a rehearsal a program has other replicas than it names, and the same batches."""

from __future__ import annotations

import pytest
import tensorflow as tf

import replicator
from replicator import strategy
from replicator.costs import rehearsal


def _made():
    repl = replicator.Replicator(["CPU:1", "CPU:3"])
    return repl, lambda batch: batch, lambda ctx: _batches(ctx)


def _batches(ctx):
    size = ctx.per_replica_batch_size(8)
    return tf.data.Dataset.range(100).batch(size)


def test_outside_of_one_a_program_is_as_it_says():
    repl, step_fn, input_fn = _made()
    assert [name[-5:] for name in repl.devices] == ["CPU:1", "CPU:3"]
    assert [len(x) for x in repl.run(step_fn, input_fn)] == [4, 4]


@pytest.mark.parametrize(
    ("count", "devices"),
    [(1, [1]), (2, [1, 3]), (4, [1, 3, 4, 5])],
)
def test_each_replica_keeps_its_batch(count, devices):
    with rehearsal.on(rehearsal.Rehearsal(count, 2)):
        repl, step_fn, input_fn = _made()
        assert [name[-5:] for name in repl.devices] == [f"CPU:{k}" for k in devices]
        assert [len(x) for x in repl.run(step_fn, input_fn)] == [4] * count
    assert _made()[0].num_replicas == 2


def test_another_strategy_takes_the_place_of_the_programs_own():
    def owners(chosen):
        with rehearsal.on(rehearsal.Rehearsal(strategy=chosen)):
            repl = replicator.Replicator(
                ["CPU:0", "CPU:1"], strategy=strategy.Mirrored()
            )
            with repl.context():
                v = tf.Variable([1.0, 2.0], name="v")
            assert v.shape == [2]
            return type(repl.strategy.node("v").synchronizer)

    assert owners(None) is strategy.AllReduceSynchronizer
    assert owners(strategy.PS()) is strategy.PSSynchronizer


def test_devices_that_do_not_exist_are_an_error():
    with rehearsal.on(rehearsal.Rehearsal(100, 2)):
        with pytest.raises(replicator.DeviceError, match="CPU:8 does not exist"):
            _made()
