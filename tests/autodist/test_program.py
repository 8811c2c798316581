# SPDX-License-Identifier: Apache-2.0
"""Only what fetches need runs; which writes are updates, and what they read first."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator.autodist import program
from tests.autodist.helpers import scope

v1 = tf.compat.v1


def _types(ops: Any) -> set[str]:
    return {op.type for op in ops}


def test_only_what_fetches_need_is_found():
    with scope() as autodist:
        x = v1.placeholder(tf.float32, [None], "x")
        w, other = tf.Variable(1.0, name="w"), tf.Variable(2.0, name="other")
        with tf.control_dependencies([other.assign_add(1.0)]):
            product = w * x
        _ = tf.sqrt(product)
        needed = program.needed([product.op], [x])
        assert [one.op.name for one in needed.handles] == ["other", "w"]
        assert x.op not in needed.ops and product.op in needed.ops
        assert {"AssignAddVariableOp", "Mul"} <= _types(needed.ops)
        assert "Sqrt" not in _types(needed.ops)
        assert not program.needed([x.op], [x]).ops  # what is fed is fetched
        assert autodist.replicator.num_replicas == 3


def test_what_is_fed_cuts_off_what_it_would_be_computed_from():
    with scope():
        pulled = v1.data.make_one_shot_iterator(tf.data.Dataset.range(9)).get_next()
        doubled = pulled * 2
        needed = program.needed([(doubled + 1).op], [])
        assert [op.type for op in needed.resources] == ["OneShotIterator"]
        needed = program.needed([(doubled + 1).op], [doubled])
        assert not needed.resources and "IteratorGetNext" not in _types(needed.ops)


def test_queues_and_tables_are_resources_but_tensor_lists_are_not():
    with scope():
        keys = tf.lookup.KeyValueTensorInitializer([1], [2])
        looked_up = tf.lookup.StaticHashTable(keys, 0).lookup(tf.constant([1]))
        pulled = tf.queue.FIFOQueue(3, [tf.int32]).dequeue()
        array = tf.TensorArray(tf.int32, 1).write(0, 1).stack()
        targets = [looked_up.op, pulled.op, array.op]
        found = program.needed(targets, []).resources
        assert {op.type for op in found} == {"HashTableV2", "FIFOQueueV2"}


def test_a_new_value_is_no_update_and_its_readers_are_free():
    with scope():
        w = tf.Variable([1.0, 2.0])
        read, rows = w.read_value(), tf.gather(w, [1])
        new, own = w.assign([3.0, 4.0]), w.assign(w + 1.0)
        ops = program.needed([read.op, rows.op, new.op, own.op], []).ops
        writes = [op for op in ops if op.type == "AssignVariableOp"]
        updates = [op for op in writes if program.is_update(op, ops)]
        assert len(writes) == 2 and len(updates) == 1
        (found,) = program.reads_first(ops).items()
        assert found[0] is updates[0]
        assert _types(found[1]) == {"ReadVariableOp", "ResourceGather"}
