# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and saved models: each private name is called."""

from __future__ import annotations

from typing import Any

import sonnet as snt
import tensorflow as tf

from replicator._tf import state


def test_in_save_context_where_functions_are_traced_for_a_saved_model(tmp_path):
    seen = []
    module = tf.Module()
    module.function = tf.function(
        lambda: seen.append(state.in_save_context()),
        input_signature=[],
        autograph=False,
    )
    module.function()
    tf.saved_model.save(module, str(tmp_path))
    assert seen == [False, True] and not state.in_save_context()


def test_saveables_are_what_the_v1_saver_asks(tmp_path):
    class Doubling(state.SaveableObject):
        def __init__(self, variable):
            self._variable = variable
            spec = state.SaveSpec(
                variable.read_value() * 2.0, "", "key", dtype=tf.float32
            )
            super().__init__(variable, [spec], "key")

        def restore(self, restored_tensors, restored_shapes):
            return self._variable.assign(restored_tensors[0])

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.Variable(3.0)
        saver = tf.compat.v1.train.Saver([Doubling(variable)])
        session.run(variable.initializer)
        path = saver.save(session, str(tmp_path / "model"))
        saver.restore(session, path)
        assert session.run(variable) == 6.0


def test_track_adds_to_the_checkpoints_of_any_optimizer(tmp_path: Any) -> None:
    optimizers = {
        "v1": tf.compat.v1.train.GradientDescentOptimizer(0.1),
        "sonnet": snt.optimizers.SGD(0.1),
    }
    for name, optimizer in optimizers.items():
        checkpoint = tf.train.Checkpoint(optimizer=optimizer)
        state.track(optimizer, "extra", tf.train.Checkpoint(v=tf.Variable(2.0)))
        path = checkpoint.write(str(tmp_path / name))
        keys = [key for key, _ in tf.train.list_variables(path)]
        assert "optimizer/extra/v/.ATTRIBUTES/VARIABLE_VALUE" in keys
