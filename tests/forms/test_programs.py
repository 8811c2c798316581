# SPDX-License-Identifier: Apache-2.0
"""Networks and Keras' own train_step, as functions of whole batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import strategy
from tests.forms.programs import doors, keras_models, networks

SIZES = (11, 8, 7)
SETTINGS: dict[str, dict[str, Any]] = {
    "mirrored": {"variables": "mirrored"},
    "sharded": {"variables": "sharded"},
    "in parts": {"strategy": strategy.PartitionedPS()},
    "proxies": {"strategy": strategy.PS(local_proxy_variable=True)},
    "bf16": {"strategy": strategy.AllReduce(compressor="bf16")},
    "clone": {"build": "clone", "variables": "mirrored"},
}


def _network(
    name: str, optimizer: str, door: Any, num_replicas: int
) -> tuple[list[Any], list[Any]]:
    """Returns the losses, and the variables behind the last step."""
    make = functools.partial(networks.Training, name, optimizer)

    def step(training, x, y):
        return training.step(x, y)

    training, function = door(step, make, networks.signature(name), num_replicas)
    losses = [np.asarray(function(*networks.batch(name, n))) for n in SIZES]
    return losses, [np.asarray(v) for v in training.state]


@functools.cache
def _network_on_one_device(name: str, optimizer: str) -> Any:
    return _network(name, optimizer, doors.one_device, 1)


def _differences(actual: Any, expected: Any) -> list[float]:
    """Returns differences, relative to the largest element of each tensor."""
    pairs = zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True)
    found = []
    for a, b in pairs:
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape
        largest = max(np.max(np.abs(b), initial=0), 1e-3)
        found.append(float(np.max(np.abs(a - b), initial=0) / largest))
    return found


def _networks() -> Any:
    quick = {
        ("convnet", "momentum", "sharded", 3),
        ("LSTM", "Adam", "proxies", 2),
        ("embedding", "SGD", "in parts", 2),
        ("MLP", "Adam", "bf16", 2),
        ("MLP", "momentum", "clone", 3),
    }
    for name in networks.NETWORKS:
        more = networks.MORE_OPTIMIZERS if name == "embedding" else {}
        for optimizer in (*networks.OPTIMIZERS, *more):
            for setting in SETTINGS:
                for num_replicas in (2, 3):
                    case = (name, optimizer, setting, num_replicas)
                    marks = () if case in quick else pytest.mark.slow
                    yield pytest.param(*case, marks=marks)


@pytest.mark.parametrize("name, optimizer, setting, num_replicas", list(_networks()))
def test_networks_train_as_on_one_device(name, optimizer, setting, num_replicas):
    door = functools.partial(doors.engine, **SETTINGS[setting])
    actual = _network(name, optimizer, door, num_replicas)
    expected = _network_on_one_device(name, optimizer)
    most = 0.1 if setting == "bf16" else 1e-3  # bfloat16 has 8 bits
    assert max(_differences(actual, expected)) < most


def _trained(name: str, door: Any, num_replicas: int) -> Any:
    """Returns the logs of each train_step, and all variables behind the last."""

    def step(model, x, y):
        return model.train_step((x, y))

    model, function = door(
        step, keras_models.MODELS[name], keras_models.SIGNATURE, num_replicas
    )
    logs = [
        tf.nest.map_structure(np.asarray, function(*batch))
        for batch in keras_models.batches()
    ]
    return logs, [np.asarray(v) for v in keras_models.state(model)]


@functools.cache
def _trained_on_one_device(name: str) -> Any:
    return _trained(name, doors.one_device, 1)


def _models() -> Any:
    quick = {
        ("clipping", "mirrored", 2),
        ("BatchNormalization", "sharded", 3),
        ("memory and counts", "mirrored", 3),
        ("a penalty", "sharded", 2),
        ("metrics in compute_loss", "mirrored", 3),
    }
    for name in keras_models.MODELS:
        for num_replicas in (2, 3):
            for setting in SETTINGS:
                is_quick = (name, setting, num_replicas) in quick
                marks = () if is_quick else pytest.mark.slow
                yield pytest.param(name, setting, num_replicas, marks=marks)


@pytest.mark.parametrize("name, setting, num_replicas", list(_models()))
def test_train_steps_of_keras_are_those_of_one_device(name, setting, num_replicas):
    door = functools.partial(doors.engine, **SETTINGS[setting])
    actual = _trained(name, door, num_replicas)
    expected = _trained_on_one_device(name)
    most = 0.1 if setting == "bf16" else 1e-3
    assert max(_differences(actual, expected)) < most
