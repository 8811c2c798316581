# SPDX-License-Identifier: Apache-2.0
"""Keras 3 optimizers: replicated training equals plain training on the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.optimizers import problem

kopt = tf.keras.optimizers

CATALOGUE = {
    "SGD": lambda: kopt.SGD(0.1),
    "Momentum": lambda: kopt.SGD(0.1, momentum=0.9),
    "Nesterov": lambda: kopt.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: kopt.Adam(0.1),
    "Amsgrad": lambda: kopt.Adam(0.1, amsgrad=True),
    "AdamW": lambda: kopt.AdamW(0.1, weight_decay=0.1),
    "RMSprop": lambda: kopt.RMSprop(0.1, momentum=0.5, centered=True),
    "Adagrad": lambda: kopt.Adagrad(0.1),
    "Adadelta": lambda: kopt.Adadelta(1.0),
    "Adafactor": lambda: kopt.Adafactor(0.1),
    "Lion": lambda: kopt.Lion(0.1),
    "Nadam": lambda: kopt.Nadam(0.1),
    "Adamax": lambda: kopt.Adamax(0.1),
    "Ftrl": lambda: kopt.Ftrl(0.1, l1_regularization_strength=0.01),
    "clipnorm": lambda: kopt.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "clipvalue": lambda: kopt.SGD(0.1, momentum=0.9, clipvalue=0.1),
    "global_clipnorm": lambda: kopt.Adam(0.1, global_clipnorm=0.5),
    "weight_decay": lambda: kopt.SGD(0.1, weight_decay=0.1),
    "ema": lambda: kopt.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "keras_accumulation": lambda: kopt.Adam(0.1, gradient_accumulation_steps=2),
    "schedule": lambda: kopt.Adam(kopt.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "loss_scale": lambda: kopt.LossScaleOptimizer(kopt.Adam(0.1), initial_scale=4.0),
}


@functools.cache
def _plain(name: str) -> list[np.ndarray]:
    return problem.train_plain(problem.KERAS, CATALOGUE[name], problem.batches(4))


def _train(name: str, replicas: int, **options: Any) -> list[np.ndarray]:
    return problem.train(
        helpers.make(replicas),
        options.pop("family", problem.KERAS),
        CATALOGUE[name],
        problem.batches(4),
        **options,
    )


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", CATALOGUE)
def test_equals_plain_on_the_whole_batch(name: str) -> None:
    actual = _train(name, 2)
    problem.assert_close(actual, _plain(name))
    # Otherwise nothing was tested.
    assert np.max(np.abs(actual[1] - problem.MATRIX)) > 1e-4


@pytest.mark.battery(5)
@pytest.mark.parametrize("replicas", [1, 3, 4])
@pytest.mark.parametrize("name", ["Momentum", "Adam"])
def test_equals_plain_on_any_number_of_replicas(name: str, replicas: int) -> None:
    problem.assert_close(_train(name, replicas), _plain(name))


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize("name", ["Momentum", "Adam", "global_clipnorm", "loss_scale"])
def test_equals_plain_in_all_modes(name: str, mode: str) -> None:
    actual = _train(name, 2, family=problem.KERAS_PAIRS, mode=mode)
    problem.assert_close(actual, _plain(name))
