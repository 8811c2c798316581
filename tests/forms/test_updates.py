# SPDX-License-Identifier: Apache-2.0
"""Ops on variables write what one device writes, wherever the variables are."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import strategy
from tests.forms import helpers

BATCH = [tf.TensorSpec([None, 3])]
STRATEGIES = {
    "default": {},
    "owned": {"strategy": strategy.PS(local_proxy_variable=True)},
    "in parts": {"strategy": strategy.PartitionedPS()},
}
INITIAL = np.arange(12, dtype=np.float32).reshape(4, 3)


def _written() -> Any:
    """Makes a function that writes a variable, and pieces of it, in all ways."""
    v, n = tf.Variable(INITIAL), tf.Variable(0)

    def step(x):
        mean = tf.reduce_mean(x, 0)
        v.assign_add(INITIAL * mean)
        v.assign_sub([mean] * 4)
        v.scatter_add(tf.IndexedSlices([mean, mean], [3, 1]))
        v.scatter_update(tf.IndexedSlices([mean], [0]))
        v.scatter_nd_sub([[2], [1]], [mean, 2 * mean])
        v[1:3].assign([mean, -mean])
        n.assign_add(tf.shape(x)[0])
        rows = tf.gather(v, tf.argmax(x, 1))
        return tf.reduce_sum(rows), v + 1.0, tf.gather_nd(v, [[1, 2], [3, 0]]), n + 0

    return step, [v, n]


def _applied() -> Any:
    """Makes a function that applies an optimizer's ops, also to rows and to slots."""
    names = ("v", "m", "a")
    v, m, a = (tf.Variable(INITIAL + k, name=name) for k, name in enumerate(names))

    def step(x):
        rows, ids = tf.stack([tf.reduce_sum(x, 0)] * 2), tf.constant([3, 1])
        whole = tf.concat([rows, rows], 0) / 10
        raw = tf.raw_ops
        raw.ResourceApplyMomentum(
            var=v.handle, accum=m.handle, lr=0.1, grad=whole, momentum=0.9
        )
        raw.ResourceSparseApplyAdagradV2(
            var=v.handle, accum=a.handle, lr=0.1, epsilon=1.0, grad=rows, indices=ids
        )
        # As many rows as the variable has: which are these, is said by the indices.
        raw.ResourceSparseApplyMomentum(
            var=v.handle,
            accum=m.handle,
            lr=0.1,
            grad=whole,
            indices=tf.constant([2, 0, 3, 1]),
            momentum=0.9,
        )
        return tf.reduce_sum(x)

    return step, [v, m, a]


def _applied_to_numbers() -> Any:
    """Makes a function whose indices and gradients have the variable's own shape."""
    v, a = (tf.Variable(INITIAL[:, 0] + k, name=name) for k, name in enumerate("va"))

    def step(x):
        # Its rank is not known while the function is built.
        rate = tf.compat.v1.placeholder_with_default(0.1, None)
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=v.handle,
            accum=a.handle,
            lr=rate,
            epsilon=1.0,
            grad=tf.stack([*tf.unstack(tf.reduce_sum(x, 0)), 1.0]),
            indices=tf.constant([2, 0, 3, 1]),
        )
        return tf.reduce_sum(x)

    return step, [v, a]


def _applied_of_any_size() -> Any:
    """Makes a function that applies a gradient whose shape only the runtime knows."""
    v = tf.Variable(INITIAL)

    def step(x):
        sizes = tf.shape(tf.repeat(x[:1], 4, 0))
        slope = tf.broadcast_to(tf.reduce_sum(x, 0), tf.abs(sizes))
        assert slope.shape.as_list() != v.shape.as_list()
        tf.raw_ops.ResourceApplyGradientDescent(var=v.handle, alpha=0.1, delta=slope)
        return tf.reduce_sum(x)

    return step, [v]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    "make", [_written, _applied, _applied_to_numbers, _applied_of_any_size]
)
def test_variables_are_written_like_on_one_device(make, name):
    helpers.run(make, BATCH, [6, 3], **STRATEGIES[name])


@pytest.mark.parametrize("name", STRATEGIES)
def test_variables_that_are_returned_are_read_after_what_was_written(name):
    def make():
        v, kept = tf.Variable([1.0, 2.0]), keras.Variable([3.0, 5.0])

        def step(x):
            kept.assign_add(tf.reduce_sum(x, 0)[:2])
            return {"v": v, "new": v.assign_add([1.0, 1.0]), "kept": kept}

        return step, [v, kept.value]

    helpers.run(make, BATCH, [6, 3], **STRATEGIES[name])


def test_a_slot_that_is_whole_is_not_updated_along_with_a_variable_in_parts():
    def make():
        v = tf.Variable(INITIAL, name="v")
        slot = tf.Variable(INITIAL, trainable=False, name="slot")

        def step(x):
            tf.raw_ops.ResourceApplyMomentum(
                var=v.handle, accum=slot.handle, lr=0.1, grad=INITIAL, momentum=0.9
            )
            return tf.reduce_sum(x)

        return step, [v, slot]

    text = r"v:0, which is in parts, along with slot:0 whole(.|\n)*test_updates.py"
    with pytest.raises(replicator.UnsupportedError, match=text):
        helpers.run(make, BATCH, [6], strategy=strategy.PartitionedPS())
