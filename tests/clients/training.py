# SPDX-License-Identifier: Apache-2.0
"""Trains a model of another library as its users do, plain and replicated.

A client's test file has programs: functions that create a model, as on one device, and
return how to train it. `check` trains it on one device by plain TensorFlow, with the
whole batches, and on replicas that share them; losses and parameters must be equal. The
single device's optimizer sees each row of a sparse gradient once, as with Replicator;
Keras 3 would square repeated rows separately.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers

STEPS = 3

ways = pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (replicas, options)
        for options in ({}, {"variables": "sharded"}, {"build": "clone"})
        for replicas in (2, 3)
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else None,
)


@dataclasses.dataclass
class Training:
    """How a model is trained.

    Attributes:
        loss: From a share of the batch, arrays of [examples, ...], to the mean loss.
        variables: Returns the trained variables; called after `loss`.
        optimizer: Of any family.
        batch: The whole batch; 2 and 3 divide its 12 examples.
        read: Returns what else must be equal: variables that hold statistics.
    """

    loss: Callable[..., tf.Tensor]
    variables: Callable[[], Sequence[Any]]
    optimizer: Any
    batch: tuple[np.ndarray, ...]
    read: Callable[[], Sequence[Any]] = lambda: ()


def check(
    program: Callable[[], Training],
    replicas: int,
    options: dict[str, Any],
    tolerance: float = 1e-4,
) -> None:
    """Asserts that training on replicas equals training on one device.

    Args:
        program: Creates the model.
        replicas: The number of replicas.
        options: Of Replicator.
        tolerance: Relative to each tensor's largest entry; 1e-4 where models compute in
            float32 and an optimizer divides by small roots.
    """
    expected_losses, expected = _on_one_device(program)
    losses, actual = _on_replicas(program, replicas, options)
    np.testing.assert_allclose(losses, expected_losses, rtol=tolerance)
    assert len(actual) == len(expected)
    for k, (one, two) in enumerate(zip(actual, expected, strict=True)):
        scale = np.max(np.abs(two), initial=1e-3)
        np.testing.assert_allclose(
            one, two, atol=tolerance * scale, rtol=0, err_msg=str(k)
        )
    assert len(set(expected_losses)) == STEPS  # otherwise nothing was trained


def _update(
    training: Training,
    batch: Sequence[Any],
    change: Callable[[Any], Any] = lambda gradient: gradient,
) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = training.loss(*batch)
    variables = list(training.variables())
    grads = [change(gradient) for gradient in tape.gradient(loss, variables)]
    if hasattr(training.optimizer, "apply"):
        training.optimizer.apply(grads, variables)
    else:
        training.optimizer.apply_gradients(zip(grads, variables, strict=True))
    return loss


def _each_row_once(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return helpers.each_row_once(gradient)
    return gradient


def _values(training: Training) -> list[np.ndarray]:
    return [np.asarray(v) for v in (*training.variables(), *training.read())]


@functools.cache
def _on_one_device(
    program: Callable[[], Training],
) -> tuple[list[float], list[np.ndarray]]:
    tf.random.set_seed(3)
    training = program()
    batch = [tf.constant(part) for part in training.batch]
    # An argument: TFP's bijectors cache eager tensors by an id, which may be reused.
    step = tf.function(lambda *batch: _update(training, batch, _each_row_once))
    return [float(step(*batch)) for _ in range(STEPS)], _values(training)


def _on_replicas(
    program: Callable[[], Training], replicas: int, options: dict[str, Any]
) -> tuple[list[float], list[np.ndarray]]:
    repl = helpers.make(replicas, **options)
    tf.random.set_seed(3)
    with repl.context():
        training = program()
        training.optimizer = repl.wrap_optimizer(training.optimizer)

    def step_fn(batch: Any) -> tf.Tensor:
        return repl.all_reduce(_update(training, batch), "mean")

    def input_fn() -> tf.data.Dataset:
        shares = [
            part.reshape(replicas, -1, *part.shape[1:]) for part in training.batch
        ]
        return helpers.untuned(
            tf.data.Dataset.from_tensor_slices(tuple(shares)).repeat()
        )

    step = repl.build(step_fn, input_fn)
    losses = [float(step()[0]) for _ in range(STEPS)]
    helpers.assert_replicas_equal([*training.variables(), *training.read()])
    return losses, _values(training)
