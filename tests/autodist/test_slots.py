# SPDX-License-Identifier: Apache-2.0
"""Optimizers' slots are found in graphs, and nothing else is."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator.autodist import slots
from tests.autodist.programs import OPTIMIZERS

v1 = tf.compat.v1
_NAMES = {"sgd": [], "momentum": ["Momentum"], "adam": ["Adam", "Adam_1"]}


def _slots() -> dict[str, str]:
    by_op = {v.op: v for v in v1.global_variables()}
    ops = v1.get_default_graph().get_operations()
    return slots.find(ops, lambda tensor: by_op.get(tensor.op))


@pytest.fixture(autouse=True)
def graph() -> Any:
    with tf.Graph().as_default(), v1.variable_scope("", use_resource=True):
        yield


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", _NAMES)
def test_the_slots_of_optimizers_are_found(name, sparse):
    w = v1.get_variable("w", [4, 2])
    read = tf.gather(w, [0, 2]) if sparse else w * 2
    OPTIMIZERS[name]().minimize(tf.reduce_mean(read**2))
    assert _slots() == {f"w/{slot}": "w" for slot in _NAMES[name]}


def test_so_are_those_of_updates_that_are_assigned():
    w = tf.Variable(tf.ones([4, 2]), name="w")
    m = tf.Variable(tf.zeros([4, 2]), trainable=False, name="m")
    rate = tf.Variable(0.1, trainable=False, name="rate")
    norm = tf.Variable(tf.ones([2, 2]), trainable=False, name="norm")
    average = tf.Variable(tf.ones([4, 2]), trainable=False, name="average")
    w.assign_sub(rate * m + tf.matmul(w, norm))
    average.assign_add(0.1 * (w - average))
    assert _slots() == {"m": "w"}


@pytest.mark.parametrize("around", ["function", "conditional", "loop"])
def test_so_are_those_that_a_function_updates(around: str) -> None:
    w = v1.get_variable("w", [4, 2])
    m = v1.get_variable("m", [4, 2], trainable=False)

    def update() -> tf.Tensor:
        ones = tf.ones([4, 2])
        tf.raw_ops.ResourceApplyMomentum(
            var=w.handle, accum=m.handle, lr=0.1, grad=ones, momentum=0.9
        )
        return tf.constant(0)

    if around == "function":
        tf.function(tf.function(update))()
    elif around == "conditional":
        tf.cond(v1.placeholder(tf.bool, []), update, lambda: 1)
    else:
        tf.while_loop(lambda i: i < 3, lambda i: i + 1 + update(), [0])
    assert _slots() == {"m": "w"}
