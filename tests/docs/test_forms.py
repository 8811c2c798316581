# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re

import tensorflow as tf

import replicator
from docs.helpers import forms
from replicator.forms.engine import WholeBatchFunction


def test_a_drawing_shows_what_is_converted() -> None:
    repl = replicator.Replicator(["CPU:0", "CPU:1"])
    with repl.context():
        w = tf.Variable(tf.ones([3, 1]))

    def train_step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.sort(x, 0) @ w)
        w.assign_sub(tape.gradient(loss, w))

    function = WholeBatchFunction(train_step, repl, [tf.TensorSpec([None, 3])])
    drawn = forms.draw(function.plan((0,))[0]).data
    calls = re.findall(r">(all_reduce|all_gather|its part)<", drawn)
    assert calls == ["all_gather"]  # of what is sorted; what follows is the same on all
    assert "AssignSubVariableOp" in drawn

    function = WholeBatchFunction(
        lambda x: w.assign(x[:3]), repl, [tf.TensorSpec([None, 1])]
    )
    assert "all_gather" in forms.draw(function.plan((0,))[0]).data
