# SPDX-License-Identifier: Apache-2.0
"""Sums over the replicas are communicated as their variables ask for."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import strategy
from replicator.forms import engine, homes
from tests.forms import helpers

SPECS = [tf.TensorSpec([None, 4]), tf.TensorSpec([None, 3])]


def regression(optimizer: Any) -> Any:
    """Makes a step that trains a kernel and a bias."""
    kernel = tf.Variable(np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3))
    bias = tf.Variable(tf.zeros([3]))
    optimizer.build([kernel, bias])

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ kernel + bias - y) ** 2)
        gradients = tape.gradient(loss, [kernel, bias])
        optimizer.apply_gradients(zip(gradients, [kernel, bias], strict=True))
        return loss

    return step, [kernel, bias]


def sgd() -> Any:
    return regression(keras.optimizers.SGD(0.1, momentum=0.9))


def homes_of(repl: Any, make: Any) -> list[tuple[str, Any]]:
    """Returns the shapes of sums, and the variables that they are for."""
    with repl.context():
        step, _ = make()
    function = engine.WholeBatchFunction(step, repl, SPECS)
    plan = function.program((0, 0)).plan
    trained = list(repl._settings.factory.trained().values())
    found = homes.found(plan, function._captured, trained)
    sums = [t for op in plan.plans for t in op.outputs if t.dtype != tf.resource]
    return [(t.op.type, found[t.ref()]) for t in sums if found.get(t.ref())]


def test_the_sum_of_a_gradient_is_for_its_variable():
    repl = replicator.Replicator(helpers.devices(2))
    found = homes_of(repl, sgd)
    by_type = {kind: [v.shape for v in of] for kind, of in found if kind == "MatMul"}
    assert by_type["MatMul"] == [[4, 3]]


@pytest.mark.parametrize("replicas", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "chosen",
    [
        strategy.PS(local_proxy_variable=True),
        strategy.PartitionedPS(),
        strategy.AllReduce(),
    ],
    ids=lambda chosen: type(chosen).__name__,
)
def test_strategies_change_no_result(chosen, replicas):
    _, repl = helpers.run(sgd, SPECS, replicas=replicas, strategy=chosen)
    assert repl.num_replicas == replicas


def test_a_strategy_s_compressor_compresses_gradients_only():
    repl = replicator.Replicator(
        helpers.devices(2), strategy=strategy.AllReduce(compressor="bf16")
    )
    with repl.context():
        step, variables = sgd()
    function = engine.WholeBatchFunction(step, repl, SPECS)
    plain, same = sgd()
    x, y = helpers.batch(SPECS, 6)
    loss, want = function(x, y), tf.function(plain)(x, y)
    np.testing.assert_allclose(loss, want, rtol=1e-5)  # the loss is not compressed
    for one, other in zip(variables, same, strict=True):
        error = np.max(np.abs(one.numpy() - other.numpy()))
        assert 0 < error < 1e-2


def test_a_wrapped_optimizer_s_compressor_remembers_in_the_optimizer():
    repl = replicator.Replicator(helpers.devices(2))

    def make() -> Any:
        optimizer = keras.optimizers.SGD(0.1)
        how = "ef(topk(ratio=0.5))"
        return regression(repl.wrap_optimizer(optimizer, compressor=how))

    with repl.context():
        step, variables = make()
    function = engine.WholeBatchFunction(step, repl, SPECS)
    first = float(function(*helpers.batch(SPECS, 6)))
    for _ in range(30):
        last = float(function(*helpers.batch(SPECS, 6)))
    assert last < first
    assert not function.memory.variables
    residuals = [
        v for v in repl._settings.factory._variables() if "compression" in v.name
    ]
    assert residuals


def test_what_compressors_remember_is_one_for_all_replicas_and_patterns():
    repl = replicator.Replicator(
        helpers.devices(2),
        strategy=strategy.AllReduce(compressor="ef(topk(ratio=0.5))"),
    )
    with repl.context():
        step, _ = sgd()
    function = engine.WholeBatchFunction(step, repl, SPECS)
    function(*helpers.batch(SPECS, 6))
    count = len(function.memory.variables)
    function(*helpers.batch(SPECS, 1))  # another plan
    function(*helpers.batch(SPECS, 7))
    assert len(function.memory.variables) == count
    assert count
