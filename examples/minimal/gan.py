# SPDX-License-Identifier: Apache-2.0
"""Trains a GAN on handwritten digits: two networks, two optimizers, one step.

python examples/minimal/gan.py GPU:0 GPU:1
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

digits = (load_digits().data / 8 - 1).astype("float32")  # [1797, 64], from -1 to 1
# Noise comes with the images, so that each replica gets its part of the same noise.
noise = tf.data.Dataset.counter().map(
    lambda k: tf.random.stateless_normal([16], seed=[1, k])
)
images = tf.data.Dataset.from_tensor_slices(digits).shuffle(1797, seed=1).repeat()
dataset = tf.data.Dataset.zip(images, noise).batch(64)

with repl.context():  # what is created here belongs to all replicas
    generator = tf.keras.Sequential(
        [
            tf.keras.layers.Dense(128, "leaky_relu"),
            tf.keras.layers.Dense(128, "leaky_relu"),
            tf.keras.layers.Dense(64, "tanh"),
        ]
    )
    discriminator = tf.keras.Sequential(
        [tf.keras.layers.Dense(128, "leaky_relu"), tf.keras.layers.Dense(1)]
    )
    optimizers = [
        repl.wrap_optimizer(tf.keras.optimizers.Adam(1e-3, beta_1=0.5))
        for _ in range(2)
    ]
loss_fn = tf.keras.losses.BinaryCrossentropy(from_logits=True)


def step_fn(real, noise):
    """Called once per replica, when the step is built."""
    with tf.GradientTape() as g, tf.GradientTape() as d:
        fake = generator(noise, training=True)
        of_real, of_fake = discriminator(real), discriminator(fake)
        g_loss = loss_fn(tf.ones_like(of_fake), of_fake)
        d_loss = loss_fn(tf.ones_like(of_real), of_real)
        d_loss += loss_fn(tf.zeros_like(of_fake), of_fake)
    for tape, loss, network, optimizer in (
        (g, g_loss, generator, optimizers[0]),
        (d, d_loss, discriminator, optimizers[1]),
    ):
        variables = network.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return repl.all_reduce((g_loss, d_loss), "mean")


for step in range(1, 1001):
    g_loss, d_loss = repl.run(step_fn, dataset)
    if step in (1, 10) or step % 200 == 0:
        drawn = generator(tf.random.stateless_normal([100, 16], seed=[2, 2]))
        nearest = tf.reduce_min(tf.norm(drawn[:, None] - digits[None], axis=2), axis=1)
        print(
            f"step {step}: generator {g_loss:.5f}, discriminator {d_loss:.5f}, "
            f"distance to the nearest digit {np.mean(nearest):.3f}"
        )
