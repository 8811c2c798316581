# SPDX-License-Identifier: Apache-2.0
"""Optimizers of legacy Keras: replicated training equals plain on the whole batch."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tf_keras

from tests import helpers
from tests.optimizers import problem

kopt = tf_keras.optimizers
old = kopt.legacy
mixed = tf_keras.mixed_precision

CATALOGUE = {
    "SGD": lambda: kopt.SGD(0.1),
    "Nesterov": lambda: kopt.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: kopt.Adam(0.1),
    "Amsgrad": lambda: kopt.Adam(0.1, amsgrad=True),
    "AdamW": lambda: kopt.AdamW(0.1, weight_decay=0.1),
    "RMSprop": lambda: kopt.RMSprop(0.1, momentum=0.5, centered=True),
    "Adagrad": lambda: kopt.Adagrad(0.1),
    "Adadelta": lambda: kopt.Adadelta(1.0),
    "Adafactor": lambda: kopt.Adafactor(0.1),
    "Lion": lambda: kopt.Lion(0.1),
    "Adamax": lambda: kopt.Adamax(0.1),
    "Ftrl": lambda: kopt.Ftrl(0.1, l1_regularization_strength=0.01),
    "clipnorm": lambda: kopt.SGD(0.1, momentum=0.9, clipnorm=0.5),
    "clipvalue": lambda: kopt.SGD(0.1, momentum=0.9, clipvalue=0.1),
    "global_clipnorm": lambda: kopt.Adam(0.1, global_clipnorm=0.5),
    "ema": lambda: kopt.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "schedule": lambda: kopt.Adam(kopt.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "loss_scale": lambda: mixed.LossScaleOptimizer(kopt.Adam(0.1), initial_scale=4.0),
    "legacy_SGD": lambda: old.SGD(0.1, momentum=0.9, nesterov=True, decay=0.1),
    "legacy_Adam": lambda: old.Adam(0.1, amsgrad=True),
    "legacy_RMSprop": lambda: old.RMSprop(0.1, momentum=0.5, centered=True),
    "legacy_Adagrad": lambda: old.Adagrad(0.1),
    "legacy_Adadelta": lambda: old.Adadelta(1.0),
    "legacy_Nadam": lambda: old.Nadam(0.1),
    "legacy_Adamax": lambda: old.Adamax(0.1),
    "legacy_Ftrl": lambda: old.Ftrl(0.1, l1_regularization_strength=0.01),
    "legacy_clipnorm": lambda: old.SGD(0.1, global_clipnorm=0.5),
    "legacy_schedule": lambda: old.Adam(kopt.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "legacy_loss_scale": lambda: mixed.LossScaleOptimizer(
        old.Adam(0.1), initial_scale=4.0
    ),
}


@functools.cache
def _plain(name: str) -> list[np.ndarray]:
    return problem.train_plain(
        problem.LEGACY_KERAS, CATALOGUE[name], problem.batches(4)
    )


def _train(
    name: str, replicas: int, *, made: dict[str, Any] | None = None, **options: Any
) -> list[np.ndarray]:
    return problem.train(
        helpers.make(replicas, **(made or {})),
        problem.LEGACY_KERAS,
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


@pytest.mark.parametrize("build", ["trace", "clone"])
@pytest.mark.parametrize("variables", ["sharded", "mirrored"])
def test_nadam_updates_all_replicas_alike(variables: str, build: str) -> None:
    """It counts its calls in Python, and thus the traces of a tf.function, too.

    Of mirrored variables, the build starts over: what it writes is made equal.
    """
    data, made = problem.batches(4), {"variables": variables, "build": build}
    one, three = (
        problem.train(helpers.make(r, **made), problem.LEGACY_KERAS, kopt.Nadam, data)
        for r in (1, 3)
    )
    problem.assert_close(three, one)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("name", ["Adam", "legacy_Adam"])
def test_equals_plain_on_any_number_of_replicas(name: str, replicas: int) -> None:
    problem.assert_close(_train(name, replicas), _plain(name))


@pytest.mark.parametrize("variables", [None, "mirrored"])
@pytest.mark.parametrize("name", ["Adam", "legacy_Adam", "legacy_loss_scale"])
def test_copies_equal_plain(name: str, variables: str | None) -> None:
    """The older kind computes its rate once on each of the variables' devices.

    And it updates them on the devices of their handles.
    """
    made = {"build": "clone"} | ({"variables": variables} if variables else {})
    problem.assert_close(_train(name, 3, made=made), _plain(name))


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", ["function", "session"])
@pytest.mark.parametrize(
    "name", ["Adam", "loss_scale", "legacy_Adam", "legacy_loss_scale"]
)
def test_equals_plain_in_all_modes(name: str, mode: str) -> None:
    problem.assert_close(_train(name, 2, mode=mode), _plain(name))
