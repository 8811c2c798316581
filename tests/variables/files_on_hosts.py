# SPDX-License-Identifier: Apache-2.0
"""Saves variables of two hosts in all ways, for test_saving_on_hosts.py.

Its arguments are the addresses of the servers. It writes into its working directory,
and prints the values that it has read, as JSON.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from tests import helpers

_v1 = tf.compat.v1


def main(addresses: list[str]) -> None:
    """Saves and restores in all ways, mirrored and sharded."""
    cluster = replicator.connect(addresses)
    helpers.SESSIONS.set(cluster.session_arguments())
    read: dict[str, Any] = {}
    for variables in ("mirrored", "sharded"):
        pathlib.Path(variables).mkdir()
        repl = replicator.Replicator(cluster.devices, variables=variables)
        for save in (checkpoint, deferred, weights, saved_model, saver):
            name = f"{variables} {save.__name__}"
            read[name] = np.asarray(save(repl, f"{variables}/{save.__name__}")).tolist()
    print(json.dumps(read))


def checkpoint(repl: replicator.Replicator, path: str) -> Any:
    """Returns a variable and a slot, after a step, changed and restored."""
    with repl.context():
        weight = tf.Variable([1.0, 2.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5, momentum=0.5))
    grads = tf.constant([2.0, 4.0])
    repl.run(lambda: optimizer.apply_gradients([(grads, weight)]))
    saved = tf.train.Checkpoint(weight=weight, optimizer=optimizer)
    written = saved.write(path)
    repl.run(lambda: optimizer.apply_gradients([(grads, weight)]))
    saved.read(written).assert_consumed()
    return [weight.numpy(), optimizer.momentums[0].numpy()]


def deferred(repl: replicator.Replicator, path: str) -> Any:
    """Returns a variable that is made after it is restored."""
    first, second = tf.Module(), tf.Module()
    with repl.context():
        first.v = tf.Variable([3.0, 4.0])
    tf.train.Checkpoint(module=first).write(path)
    tf.train.Checkpoint(module=second).read(path)
    with repl.context():
        second.v = tf.Variable([0.0, 0.0])
    return second.v.numpy()


def weights(repl: replicator.Replicator, path: str) -> Any:
    """Returns the weights of a Keras model, changed and loaded."""
    with repl.context():
        layers = [tf.keras.Input([2]), tf.keras.layers.Dense(1, use_bias=False)]
        model = tf.keras.Sequential(layers)
    model.set_weights([np.array([[5.0], [6.0]])])
    model.save_weights(f"{path}.weights.h5")
    model.set_weights([np.zeros([2, 1])])
    model.load_weights(f"{path}.weights.h5")
    return model.get_weights()[0][:, 0]


def saved_model(repl: replicator.Replicator, path: str) -> Any:
    """Returns the result of a loaded function, which reads a variable."""
    module = tf.Module()
    with repl.context():
        module.v = tf.Variable([7.0, 8.0])
    module.f = tf.function(lambda: 2 * module.v, input_signature=[])
    tf.saved_model.save(module, path)
    loaded = tf.saved_model.load(path)
    return loaded.f()


def saver(repl: replicator.Replicator, path: str) -> Any:
    """Returns a variable of a session, changed and restored."""
    with tf.Graph().as_default():
        with repl.context():
            v = _v1.get_variable("v", initializer=[9.0, 10.0])
        saves, change = _v1.train.Saver(), v.assign([0.0, 0.0])
        with helpers.session() as session:
            session.run(_v1.global_variables_initializer())
            saves.save(session, path)
            session.run(change)
            saves.restore(session, path)
            return session.run(v.read_value())


if __name__ == "__main__":
    main(sys.argv[1:])
