# SPDX-License-Identifier: Apache-2.0
"""Learns to compare handwritten digits, without labels: a loss over the whole batch.

    python examples/minimal/contrastive.py GPU:0 GPU:1

Each image is found again, among those of all replicas, from a distorted view (SimCLR,
Chen et al. 2020, arXiv:2002.05709). The loss is that of one device with the same batch.
"""

import sys

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import replicator

repl = replicator.Replicator(
    sys.argv[1:] or ["CPU:0", "CPU:1"], input_mode="global_batch"
)
tf.keras.utils.set_random_seed(1)

images = (load_digits().images / 16).astype("float32")[..., None]


def views(k, image):
    """Returns two views: each moved by up to a pixel, and with pixels left out."""

    def view(seed):
        moved = tf.pad(image, [[1, 1], [1, 1], [0, 0]])
        moved = tf.image.stateless_random_crop(moved, [8, 8, 1], seed)
        kept = tf.random.stateless_uniform([8, 8, 1], seed) > 0.1
        return moved * tf.cast(kept, tf.float32)

    return view([1, k]), view([2, k])


def batches(images, size):
    """Returns batches of two views, and of the place of each row in its batch."""
    rows = tf.data.Dataset.from_tensor_slices(images).shuffle(1797, seed=1).repeat()
    pairs = rows.enumerate().map(views).batch(size)
    return pairs.map(lambda one, two: (one, two, tf.range(len(one))))


dataset = batches(images[:1500], 128)
with repl.context():  # what is created here belongs to all replicas
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32),
            tf.keras.layers.UnitNormalization(),
        ]
    )
    optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(2e-3))


def step_fn(one, two, places):
    """Called once per replica, when the step is built."""
    with tf.GradientTape() as tape:
        others = repl.all_gather(model(two), axis=0)  # of the whole batch, in its order
        logits = model(one) @ tf.transpose(others) / 0.2
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(places, logits)
        loss = tf.reduce_mean(losses)
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return repl.all_reduce(loss, "mean")


one, two, places = next(iter(batches(images[1500:], 297)))
for step in range(1, 301):
    loss = repl.run(step_fn, dataset)
    if step in (1, 10) or step % 100 == 0:
        found = tf.argmax(model(one) @ tf.transpose(model(two)), axis=1)
        share = np.mean(found.numpy() == places.numpy())
        print(f"step {step}: loss {loss:.5f}, {share:.4f} of the test images found")
