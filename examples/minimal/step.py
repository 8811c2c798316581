# SPDX-License-Identifier: Apache-2.0
"""Trains on handwritten digits with a step of your own; copy it and change it.

python examples/minimal/step.py GPU:0 GPU:1
"""

import sys

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import replicator

# First, since TensorFlow splits the CPU only before it has run anything. Batches are
# divided among the replicas, evenly or not.
repl = replicator.Replicator(
    sys.argv[1:] or ["CPU:0", "CPU:1"], input_mode="global_batch"
)
tf.keras.utils.set_random_seed(1)

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
images = (images[order] / 16).astype("float32")
labels = labels[order]
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500]))
train = train.shuffle(1500, seed=1).batch(64)
test = tf.data.Dataset.from_tensor_slices((images[1500:], labels[1500:])).batch(64)

with repl.context():  # what is created here belongs to all replicas
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10)]
    )
    optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam(0.01))
loss_fn = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def train_step(images, labels):
    """Called once per replica, when the step is built."""
    with tf.GradientTape() as tape:
        loss = loss_fn(labels, model(images, training=True))
    variables = model.trainable_variables
    gradients = tape.gradient(loss, variables)
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return repl.all_reduce(loss, "mean")  # of all examples, on every replica


def test_step(images, labels):
    """Counts the images that the model classifies correctly, on all replicas."""
    correct = tf.argmax(model(images, training=False), axis=1) == labels
    return repl.all_reduce(tf.reduce_sum(tf.cast(correct, tf.float32)))


for epoch in range(1, 6):
    losses = list(repl.epoch(train_step, train))
    accuracy = sum(repl.epoch(test_step, test)) / len(images[1500:])
    mean = sum(losses) / len(losses)
    print(f"epoch {epoch}: loss {mean:.5f}, test accuracy {accuracy:.4f}")
