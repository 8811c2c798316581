# SPDX-License-Identifier: Apache-2.0
"""The accuracy of a model on a set of examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from support.data import Examples, single_pass_input

import tensorflow as tf

import replicator


def share_of_right(
    eval_step: Any, examples: int, global_batch_size: int
) -> Callable[[], float]:
    """Returns a function that computes the share of correctly classified examples.

    Args:
        eval_step: A built step that returns the number of correct ones, the same on
            each replica.
        examples: The number of examples.
        global_batch_size: How many a step takes, over all replicas.
    """

    def share() -> float:
        eval_step.initialize()  # from the first example
        calls = math.ceil(examples / global_batch_size)
        return sum(float(eval_step()[0]) for _ in range(calls)) / examples

    return share


def accuracy_on(
    repl: replicator.Replicator,
    model: tf.keras.Model,
    examples: Examples,
    global_batch_size: int,
) -> Callable[[], float]:
    """Returns a function that computes a model's accuracy on the examples.

    Args:
        repl: The Replicator, whose replicas share the examples.
        model: From images to logits.
        examples: Each of them counts once.
        global_batch_size: How many images a step takes, over all replicas.
    """

    def eval_step(batch: tuple[tf.Tensor, tf.Tensor, tf.Tensor]) -> Any:
        images, labels, weights = batch
        logits = model(images, training=False)
        correct = tf.cast(tf.argmax(logits, axis=-1) == labels, tf.float32)
        sums = tf.reduce_sum(weights * correct), tf.reduce_sum(weights)
        return repl.all_reduce(sums, "sum")

    rows = examples.images, examples.labels
    step = repl.build(eval_step, single_pass_input(rows, global_batch_size))
    count = math.ceil(len(examples) / global_batch_size)

    def accuracy() -> float:
        step.initialize()  # from the first example
        sums = [step() for _ in range(count)]
        correct = sum(float(correct[0]) for correct, _ in sums)
        return correct / sum(float(count[0]) for _, count in sums)

    return accuracy
