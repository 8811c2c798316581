# SPDX-License-Identifier: Apache-2.0
"""Ops that one replica runs for all, as opposed to each, in the built graph."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.costs import rehearsal

_REPLICAS = (1, 2, 4)
_NUMBER = re.compile(r"_\d+(?=/|$)")  # of a name that was taken


def _once(
    replicas: int, make: Callable[[replicator.Replicator], Any], **options: Any
) -> set[str]:
    """Returns the names of shared ops, without replicas and numbers."""
    rehearsed = rehearsal.Rehearsal(replicas, 2)
    with rehearsal.on(rehearsed):
        repl = replicator.Replicator(["CPU:0", "CPU:1"], **options)
        with repl.context():
            step_fn = make(repl)
        _ = repl.build(step_fn).plan
    return {re.sub(r"replica_\d+/", "", name) for name in rehearsed.ops_for_all}


def _trains(optimizer: Callable[[], Any]) -> Callable[[replicator.Replicator], Any]:
    def make(repl: replicator.Replicator) -> Any:
        matrix = tf.Variable(tf.ones([4, 3]))
        wrapped = repl.wrap_optimizer(optimizer())
        wrapped.build([matrix])

        def step_fn() -> tf.Tensor:
            x = tf.random.uniform([5, 4])
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.tanh(tf.matmul(x, matrix, name="product")))
            wrapped.apply_gradients([(tape.gradient(loss, matrix), matrix)])
            return loss

        return step_fn

    return make


@pytest.mark.parametrize("replicas", _REPLICAS)
def test_an_update_of_what_one_owns_is_done_once(replicas: int) -> None:
    sgd = _trains(lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9))
    actual = _once(replicas, sgd, variables="sharded")
    writes = [name for name in actual if "Assign" in name]
    assert len(writes) == 2  # the matrix and its momentum
    assert any("Mul" in name for name in actual)
    each = ("product", "Tanh", "Sum", "communicate", "random_uniform")
    assert not [name for name in actual if any(own in name for own in each)]


def test_as_much_is_done_once_whatever_the_number_of_replicas() -> None:
    adam = _trains(lambda: tf.keras.optimizers.Adam(0.1))
    counted = []
    for replicas in _REPLICAS:
        kinds = [_NUMBER.sub("", n) for n in _once(replicas, adam, variables="sharded")]
        # A constant belongs to one replica if another one has replaced it.
        counted.append(collections.Counter(k for k in kinds if "Assign" in k))
    assert counted[0] == counted[1] == counted[2]
    assert counted[0].total() >= 3  # the matrix and two slots


@pytest.mark.parametrize("replicas", _REPLICAS)
def test_nothing_is_done_once_where_each_has_its_own(replicas: int) -> None:
    sgd = _trains(lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9))
    assert not _once(replicas, sgd, variables="mirrored")


@pytest.mark.parametrize("replicas", _REPLICAS)
def test_what_is_returned_or_printed_is_each_replicas_own(replicas: int) -> None:
    def make(repl: replicator.Replicator) -> Any:
        # For other variables, replicas communicate the mean of their assignments.
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        v = tf.Variable(tf.ones([3]), aggregation=first)

        def step_fn() -> tf.Tensor:
            total = repl.all_reduce(tf.random.uniform([3]))
            shown = tf.sin(total, name="shown")
            returned = tf.cos(total, name="returned")
            v.assign(shown + returned * tf.exp(total, name="written"))
            tf.print(shown[:1], output_stream="file:///dev/null")
            return returned

        return step_fn

    actual = _once(replicas, make, variables="sharded")
    assert not {"shown", "returned"} & actual
    assert any("Assign" in name for name in actual)
    assert replicas > 1 or "written" in actual


def test_outside_of_a_rehearsal_nothing_is_noted_and_one_replica_owns_nothing() -> None:
    repl = replicator.Replicator(["CPU:0"], variables="sharded")
    with repl.context():
        v = tf.Variable(tf.ones([3]))
    assert v.placement.owner is None
    _ = repl.build(lambda: v.assign_add(repl.all_reduce(tf.ones([3])))).plan
    assert not rehearsal._NO_REHEARSAL.ops_for_all
    with rehearsal.on(rehearsal.Rehearsal(1, 2)):
        repl = replicator.Replicator(["CPU:0", "CPU:1"], variables="sharded")
        with repl.context():
            v = tf.Variable(tf.ones([3]))
    assert v.placement.owner == 0
