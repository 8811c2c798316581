# SPDX-License-Identifier: Apache-2.0
"""Programs of whole batches equal one device under every strategy and optimizer."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from replicator import strategy
from replicator.forms.engine import WholeBatchFunction

_SETTINGS: dict[str, dict[str, Any]] = {
    "mirrored": {"variables": "mirrored"},
    "sharded": {"variables": "sharded"},
    "copied": {"variables": "mirrored", "build": "clone"},
    "proxies": {"strategy": strategy.PS(local_proxy_variable=True)},
    "parts": {"strategy": strategy.PartitionedPS()},
    "bf16": {"strategy": strategy.AllReduce(compressor="bf16")},
}
# Adam's own epsilon, 1e-7, makes updates of small gradients depend on rounding.
_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "keras": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3),
    "tf_keras": lambda: tf_keras.optimizers.Adam(0.01, epsilon=1e-3, jit_compile=False),
    "older": lambda: tf_keras.optimizers.legacy.Adam(0.01, epsilon=1e-3),
    "v1": lambda: tf.compat.v1.train.AdamOptimizer(0.01, epsilon=1e-3),
    "sonnet": lambda: snt.optimizers.Adam(0.01, epsilon=1e-3),
}
_SIGNATURE = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, 6])]
_METRIC = {
    "trainable": False,
    "synchronization": tf.VariableSynchronization.ON_READ,
}
_SUM, _MEAN = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN


def _program(make_optimizer: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """Returns a training step of two metrics, and its variables."""
    rng = np.random.default_rng(0)
    table, matrix, bias = (
        tf.Variable(rng.normal(size=shape), dtype=tf.float32)
        for shape in ([20, 8], [8, 6], [6])
    )
    total = tf.Variable(0.0, aggregation=_SUM, **_METRIC)
    average = tf.Variable(np.ones(6, np.float32), aggregation=_MEAN, **_METRIC)
    optimizer = make_optimizer()

    def step(rows: tf.Tensor, y: tf.Tensor) -> Any:
        trained = [table, matrix, bias]
        with tf.GradientTape() as tape:
            predicted = tf.tanh(tf.gather(table, rows) @ matrix + bias)
            loss = tf.reduce_mean((predicted - y) ** 2)
        grads = tape.gradient(loss, trained)
        if hasattr(optimizer, "apply_gradients"):
            optimizer.apply_gradients(zip(grads, trained, strict=True))
        else:
            optimizer.apply(grads, trained)
        total.assign_add(tf.reduce_sum(y))
        average.assign(0.9 * average + 0.1 * tf.reduce_mean(predicted, 0))
        return loss, total + 1.0, average

    return step, [table, matrix, bias, total, average]


def _batch(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    rows = rng.integers(0, 20, size).astype(np.int32)
    return rows, rng.normal(size=[size, 6]).astype(np.float32)


def _results(run: Callable[..., Any], variables: list[Any]) -> list[np.ndarray]:
    results = [np.asarray(x) for n in (7, 8, 5) for x in run(*_batch(n))]
    return [*results, *(variable.numpy() for variable in variables)]


def _run(setting: str, optimizer: str, wraps: bool, **how: Any) -> tuple[Any, Any]:
    """Returns a Replicator that has run the program, and what it has computed."""
    count = 3 if setting == "copied" else 2
    devices = [f"CPU:{k}" for k in range(count)]
    repl = replicator.Replicator(devices, **_SETTINGS[setting])

    def make_optimizer() -> Any:
        made = _OPTIMIZERS[optimizer]()
        return repl.wrap_optimizer(made, **how) if wraps else made

    with repl.context():
        step, variables = _program(make_optimizer)
        run = WholeBatchFunction(step, repl, _SIGNATURE)
        results = _results(run, variables)
    for part in (p for v in variables for p in getattr(v, "parts", [v])):
        if not part.placement.adds_up:
            for component in part.components:
                np.testing.assert_array_equal(component, part.components[0])
    return repl, results


_SOME = [("proxies", "v1", True), ("parts", "keras", False), ("copied", "older", True)]
_REST = [
    (setting, optimizer, wraps)
    for number, setting in enumerate(_SETTINGS)
    for other, optimizer in enumerate(_OPTIMIZERS)
    for wraps in [bool((number + other) % 2)]
    if (setting, optimizer, wraps) not in _SOME
]


def _check(setting: str, optimizer: str, wraps: bool) -> None:
    step, variables = _program(_OPTIMIZERS[optimizer])
    wanted = _results(tf.function(step), variables)
    repl, results = _run(setting, optimizer, wraps)
    tolerance = 2e-2 if setting == "bf16" else 1e-4
    for result, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(result, want, tolerance, tolerance)
    kinds = collections.Counter(row.primitive for row in repl.plan)
    assert kinds["broadcast"] == (1 if setting == "proxies" else 0)


@pytest.mark.parametrize("setting, optimizer, wraps", _SOME)
def test_steps_equal_one_device(setting, optimizer, wraps):
    _check(setting, optimizer, wraps)


@pytest.mark.slow
@pytest.mark.parametrize("setting, optimizer, wraps", _REST)
def test_steps_equal_one_device_in_all_settings(setting, optimizer, wraps):
    _check(setting, optimizer, wraps)


def test_gradients_of_several_batches_are_accumulated():
    step, variables = _program(_OPTIMIZERS["keras"])
    trained, optimizer = variables[:3], _OPTIMIZERS["keras"]()
    table, matrix, bias = trained
    sums: list[Any] = [tf.zeros_like(variable) for variable in trained]
    for size in (7, 8):
        rows, y = _batch(size)
        with tf.GradientTape() as tape:
            predicted = tf.tanh(tf.gather(table, rows) @ matrix + bias)
            loss = tf.reduce_mean((predicted - y) ** 2)
        grads = map(tf.convert_to_tensor, tape.gradient(loss, trained))
        sums = [total + grad / 2 for total, grad in zip(sums, grads, strict=True)]
    optimizer.apply(sums, trained)
    _, results = _run("sharded", "keras", True, accumulation_steps=2)
    for result, want in zip(results[-5:-2], trained, strict=True):
        np.testing.assert_allclose(result, want, 1e-5, 1e-5)


def test_a_wrapped_optimizer_says_how_gradients_are_compressed():
    repl, _ = _run("mirrored", "keras", True, compressor="bf16")
    operands = [value for row in repl.plan for value in row.operands[0]]
    dtypes = {value.dtype for value in operands if value.shape in ([8, 6], (8, 6))}
    assert dtypes == {"bfloat16"}
