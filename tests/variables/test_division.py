# SPDX-License-Identifier: Apache-2.0
"""Variables are created in parts, with their slots."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.placement import Mirrored, Owned
from tests.variables import parted


def test_each_part_is_where_it_was_said_to_be() -> None:
    what = parted.chosen(1, [1, 4, 2], [Owned(1), Mirrored(), Owned(0)])
    repl = parted.replicas(2, parted.As(what))
    with repl.context():
        v = tf.Variable(np.arange(14.0).reshape(2, 7), dtype=tf.float32, name="table")
    assert isinstance(v, PartitionedVariable)
    assert [part.name for part in v.parts] == [f"table/part_{k}:0" for k in range(3)]
    places = [{c.device[-5:] for c in part.components} for part in v.parts]
    assert places == [{"CPU:1"}, {"CPU:0", "CPU:1"}, {"CPU:0"}]
    assert v.trainable
    assert not any(part.trainable for part in v.parts)


def test_slots_are_in_the_parts_of_their_variables() -> None:
    repl = parted.replicas(2)
    with repl.context():
        v = tf.Variable(tf.zeros([7, 4]), name="table")
        adam = repl.wrap_optimizer(tf.keras.optimizers.Adam())
        adam.build([v])
    for slot in adam.variables[2:]:
        slot = slot.value
        assert slot.shape == [7, 4]
        assert slot.layout == v.layout
        for own, part in zip(slot.parts, v.parts, strict=True):
            assert own.placement == part.placement
            assert part.storage.slots()


def test_in_a_graph_only_wholes_are_in_collections() -> None:
    with tf.Graph().as_default():
        with parted.replicas(2).context():
            v = tf.Variable(tf.zeros([7, 4]), name="table")
        assert tf.compat.v1.global_variables() == [v]
        assert tf.compat.v1.trainable_variables() == [v]
