# SPDX-License-Identifier: Apache-2.0
"""Trains a network on handwritten digits, as programs of TensorFlow 1 do.

The program is written for one device and knows nothing of replicas: placeholders, a
graph, an optimizer, a session. Three lines, each marked, make it run on many devices:

    python examples/graph_mode.py                       # on two devices
    python examples/graph_mode.py --devices=CPU:0       # on one
    python examples/graph_mode.py --devices=GPU:0,GPU:1,GPU:2,GPU:3
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import replicator  # 1

v1 = tf.compat.v1


def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns training images and labels, and test images and labels."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order], labels[order].astype(np.int32)
    return images[:1500], labels[:1500], images[1500:], labels[1500:]


def batches(
    images: np.ndarray, labels: np.ndarray, size: int, epochs: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields batches, shuffled; the last one of an epoch is smaller."""
    rng = np.random.default_rng(1)
    for _ in range(epochs):
        order = rng.permutation(len(images))
        for begin in range(0, len(images), size):
            chosen = order[begin : begin + size]
            yield images[chosen], labels[chosen]


def dense(x: tf.Tensor, units: int, name: str) -> tf.Tensor:
    """Returns a layer of some units, without an activation."""
    with v1.variable_scope(name):
        kernel = v1.get_variable("kernel", [x.shape[-1], units])
        bias = v1.get_variable("bias", [units], initializer=v1.zeros_initializer())
    return tf.matmul(x, kernel) + bias


def train(devices: list[str], epochs: int, checkpoint: str | None) -> float:
    """Trains, prints its progress, and returns the accuracy on the test images."""
    train_images, train_labels, test_images, test_labels = digits()
    with tf.Graph().as_default(), replicator.AutoDist(devices).scope() as autodist:  # 2
        v1.set_random_seed(0)
        images = v1.placeholder(tf.float32, [None, 64], "images")
        labels = v1.placeholder(tf.int32, [None], "labels")
        rate = v1.placeholder(tf.float32, [], "rate")

        hidden = tf.nn.relu(dense(images, 64, "hidden"))
        logits = dense(hidden, 10, "logits")
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=labels, logits=logits
        )
        loss = tf.reduce_mean(losses)
        right = tf.equal(tf.argmax(logits, 1, tf.int32), labels)
        accuracy = tf.reduce_mean(tf.cast(right, tf.float32))

        step = v1.train.get_or_create_global_step()
        optimizer = v1.train.AdamOptimizer(rate)
        gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
        clipped, _ = tf.clip_by_global_norm(gradients, 1.0)
        train_op = optimizer.apply_gradients(zip(clipped, variables, strict=True), step)
        saver = v1.train.Saver()

        session = autodist.create_distributed_session()  # 3
        test = {images: test_images, labels: test_labels}
        for x, y in batches(train_images, train_labels, 128, epochs):
            feed = {images: x, labels: y, rate: 0.003}
            value, _ = session.run([loss, train_op], feed)
            step_number = session.run(step)
            if step_number % 24 == 0:
                reached = session.run(accuracy, test)
                print(f"step {step_number}: loss {value:.3f}, accuracy {reached:.3f}")
        if checkpoint:
            print("saved", saver.save(session, checkpoint, step))
        return float(session.run(accuracy, test))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    result = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    result.add_argument(
        "--devices",
        default="CPU:0,CPU:1",
        help="The devices, separated by commas (default: %(default)s).",
    )
    result.add_argument(
        "--epochs",
        type=int,
        default=10,
        help="Passes over the training images (default: %(default)s).",
    )
    result.add_argument("--checkpoint", help="Where to save the variables.")
    return result


def main() -> None:
    """Reads the arguments, and trains."""
    arguments = parser().parse_args()
    reached = train(
        arguments.devices.split(","), arguments.epochs, arguments.checkpoint
    )
    print(f"accuracy {reached:.3f}")


if __name__ == "__main__":
    main()
