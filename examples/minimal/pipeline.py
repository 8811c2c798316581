# SPDX-License-Identifier: Apache-2.0
"""Trains a network whose stages are on different devices; copy it and change it.

    python examples/minimal/pipeline.py GPU:0 GPU:1

A batch is cut into micro-batches, so that a stage works on one while the next stage
works on the one before it (GPipe, Huang et al. 2019, arXiv:1811.06965).
"""

import sys

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import replicator
from replicator import strategy


class OnStages(strategy.Builder):
    """Places the variables of stage_k, and their optimizer's state, on device k."""

    def nodes(self, variables, resources):
        """Yields the place of each variable."""
        for variable in variables:
            stage = int(variable.path.split("/")[0].removeprefix("stage_"))
            where = strategy.PSSynchronizer(resources.devices[stage])
            yield strategy.Node(variable.path, where)


repl = replicator.Replicator(sys.argv[1:] or ["CPU:0", "CPU:1"], strategy=OnStages())
tf.keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
images, labels = (images[order] / 16).astype("float32"), labels[order]
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
train = train.shuffle(1500, seed=1).batch(64, drop_remainder=True)

with repl.context():
    layers = [tf.keras.layers.Dense(128, "relu") for _ in range(3)]
    layers, stages = [*layers, tf.keras.layers.Dense(10)], []
    for k, part in enumerate(np.array_split(layers, repl.num_replicas)):
        stages.append(tf.keras.Sequential([*part], name=f"stage_{k}"))
        stages[k].build([None, 128 if k else 64])
    optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(2e-3), op="sum")
variables = [v for stage in stages for v in stage.trainable_variables]


def step_fn(images, labels):
    """Called once per replica, when the step is built."""
    own = repl.replica_id
    loss = tf.constant(0.0)  # and stays so, except on the last stage
    with tf.GradientTape() as tape:
        for hidden, y in zip(tf.split(images, 4), tf.split(labels, 4), strict=True):
            if own > 0:
                like = tf.zeros([len(hidden), 128])
                tape.watch(like)  # so that its gradient is sent back
                hidden = repl.recv(like, own - 1)
            hidden = stages[own](hidden)
            if own + 1 < repl.num_replicas:
                repl.send(hidden, own + 1)
            else:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, hidden)
                loss += tf.reduce_mean(losses) / 4
        linked = repl.linked(loss)  # depends on what was sent
    gradients = tape.gradient(linked, variables)  # None for those of other stages
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return repl.all_reduce(loss)


network = tf.keras.Sequential(stages)
for epoch in range(1, 11):
    # Each replica is passed the whole batch, and uses its images or its labels.
    losses = [float(repl.run(step_fn, args=batch)) for batch in train]
    logits = network.predict(images[1500:], verbose=0)
    accuracy = np.mean(np.argmax(logits, axis=1) == labels[1500:])
    print(f"epoch {epoch}: loss {np.mean(losses):.5f}, test accuracy {accuracy:.4f}")
