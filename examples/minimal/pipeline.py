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
    """Places each stage's variables, and their optimizer's state, on its device."""

    def nodes(self, variables, resources):
        """Yields the place of each variable, whose path begins with "stage_k"."""
        for variable in variables:
            stage = int(variable.path.split("/")[0].removeprefix("stage_"))
            where = strategy.PSSynchronizer(resources.devices[stage])
            yield strategy.Node(variable.path, where)


repl = replicator.Replicator(sys.argv[1:] or ["CPU:0", "CPU:1"], strategy=OnStages())
last = repl.num_replicas - 1
tf.keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
images, labels = (images[order] / 16).astype("float32"), labels[order]
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
train = train.shuffle(1500, seed=1).batch(64, drop_remainder=True)

sizes, stages = [64, 128, 128, 128, 10], []  # of the activations between the layers
with repl.context():
    for k, own in enumerate(np.array_split(range(1, len(sizes)), repl.num_replicas)):
        stage = [tf.keras.layers.Input([sizes[own[0] - 1]])]
        for n in own:
            relu = "relu" if n < len(sizes) - 1 else None
            stage.append(tf.keras.layers.Dense(sizes[n], relu))
        stages.append(tf.keras.Sequential(stage, name=f"stage_{k}"))
    optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(2e-3), op="sum")
variables = [v for stage in stages for v in stage.trainable_variables]


def forward(hidden, tape):
    """Runs this replica's stage; the last one returns logits."""
    stage = stages[repl.replica_id]
    if repl.replica_id > 0:
        like = tf.zeros([len(hidden), stage.input_shape[-1]])
        tape.watch(like)  # so that its gradient is sent back
        hidden = repl.recv(like, repl.replica_id - 1)
    hidden = stage(hidden)
    if repl.replica_id < last:
        repl.send(hidden, repl.replica_id + 1)
    return hidden


def step_fn(images, labels):
    """Is called once per replica, when the step is built."""
    loss = tf.constant(0.0)  # and stays so, except on the last stage
    with tf.GradientTape() as tape:
        for x, y in zip(tf.split(images, 4), tf.split(labels, 4), strict=True):
            logits = forward(x, tape)
            if repl.replica_id == last:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
                loss += tf.reduce_mean(losses) / 4
        linked = repl.linked(loss)  # depends on what was sent
    gradients = tape.gradient(linked, variables)  # None for those of other stages
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return repl.all_reduce(loss)


for epoch in range(1, 11):
    # Each replica is passed the whole batch, and uses its images or its labels.
    losses = [float(repl.run(step_fn, args=batch)) for batch in train]
    hidden = images[1500:]
    for stage in stages:
        hidden = stage(hidden)
    accuracy = np.mean(np.argmax(hidden, axis=1) == labels[1500:])
    mean = sum(losses) / len(losses)
    print(f"epoch {epoch}: loss {mean:.5f}, test accuracy {accuracy:.4f}")
