# SPDX-License-Identifier: Apache-2.0
"""Proxies of owned variables equal their variable, whatever writes it."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.strategy import PS, PSLoadBalancing
from tests import helpers
from tests.strategy.test_choosing import CPUS, On

STRATEGIES = {
    "none": (None, "mirrored"),
    "on a replica": (lambda: PS(local_proxy_variable=True), "mirrored"),
    "balanced": (lambda: PSLoadBalancing(local_proxy_variable=True), "auto"),
    "apart": (lambda: On("CPU:5", local_replication=True), "mirrored"),
}


def _replicator(name: str, count: int, **options: Any) -> replicator.Replicator:
    make, variables = STRATEGIES[name]
    strategy = None if make is None else make()
    return helpers.make(count, variables=variables, strategy=strategy, **options)


def _optimizers() -> dict[str, Any]:
    train = tf.compat.v1.train
    return {
        "Adam": lambda: tf.keras.optimizers.Adam(0.1, weight_decay=0.01),
        "Momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True),
        "v1 Adagrad": lambda: train.AdagradOptimizer(0.1),
    }


def _trained(name: str, count: int, mode: str, optimizer: str, **how: Any) -> Any:
    """Returns the last step's reads, and the final values."""
    repl = _replicator(name, count)
    variables: list[Any] = []

    def make_step() -> Any:
        v = tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="v")
        w = tf.Variable([0.5, 0.25], name="w")
        wrapped = repl.wrap_optimizer(_optimizers()[optimizer](), **how)
        variables[:] = [v, w]

        def step_fn() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((v @ w[:, tf.newaxis]) ** 2)
                loss *= 1.0 + tf.cast(repl.replica_id, tf.float32)
            pairs = zip(tape.gradient(loss, [v, w]), [v, w], strict=True)
            wrapped.apply_gradients(pairs)
            w.assign_add([0.125 * repl.replica_id, 0.25])
            return loss, v.read_value(), w + 0.0

        return step_fn

    actual = helpers.run(mode, repl, make_step, steps=3)
    if mode != "session":
        helpers.assert_replicas_equal(variables)
        actual = [actual, [helpers.components(v)[0] for v in variables]]
    return actual, variables, repl


@pytest.mark.battery(5)
@pytest.mark.parametrize("optimizer", _optimizers())
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", ["on a replica", "apart"])
def test_training_is_that_of_mirrored_variables(
    name: str, mode: str, optimizer: str
) -> None:
    expected, _, _ = _trained("none", 2, mode, optimizer)
    actual, _, _ = _trained(name, 2, mode, optimizer)
    tf.nest.map_structure(
        lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-6),
        tf.nest.flatten(actual),
        tf.nest.flatten(expected),
    )


@pytest.mark.parametrize("name", ["balanced", "apart"])
def test_accumulated_updates_reach_the_copies(name: str) -> None:
    for count in (1, 3):
        expected, _, _ = _trained("none", count, "eager", "Adam", accumulation_steps=2)
        actual, _, _ = _trained(name, count, "eager", "Adam", accumulation_steps=2)
        for one, two in zip(
            tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True
        ):
            np.testing.assert_allclose(one, two, rtol=1e-6)


def test_reads_are_local_and_updates_are_handed_out_once() -> None:
    _, (v, w), repl = _trained("apart", 3, "eager", "Adam")
    assert [c.device for c in v.components] == [*repl.devices, CPUS[0][:-1] + "5"]
    assert v.owner == w.owner == 0
    sent = {row.primitive: row for row in repl.plan if row.primitive == "broadcast"}
    assert sent["broadcast"].nbytes == 2 * (16 + 8)  # to each of the two others
    assert not repl.plan.notes


def test_writes_outside_reach_all(tmp_path: pathlib.Path) -> None:
    repl = _replicator("apart", 2)
    with repl.context():
        v = tf.Variable([1.0, 2.0])
    v.assign([3.0, 4.0])
    v.assign_add([1.0, 1.0])
    v.scatter_nd_update([[0]], [7.0])
    assert [c.tolist() for c in helpers.components(v)] == [[7.0, 5.0]] * 3
    assert v.numpy().tolist() == [7.0, 5.0]
    checkpoint = tf.train.Checkpoint(v=v)
    path = checkpoint.write(str(tmp_path / "copies"))
    v.assign([0.0, 0.0])
    checkpoint.read(path)
    assert [c.tolist() for c in helpers.components(v)] == [[7.0, 5.0]] * 3


@pytest.mark.parametrize("name", ["on a replica", "apart"])
@pytest.mark.parametrize("method", ["assign", "assign_add", "scatter", "slice"])
def test_what_a_step_assigns_reaches_all(name: str, method: str) -> None:
    repl = _replicator(name, 2)
    with repl.context():
        v = tf.Variable([1.0, 2.0])

    def step_fn() -> tf.Tensor:
        x = 1.0 + tf.cast(repl.replica_id, tf.float32)
        if method == "scatter":
            v.scatter_nd_add([[0]], [x])
        elif method == "slice":
            v[1].assign(x)
        else:
            getattr(v, method)([x, x])
        return v.read_value()

    expected = {
        "assign": [1.5, 1.5],
        "assign_add": [2.5, 3.5],
        "scatter": [2.5, 2.0],
        "slice": [1.0, 1.5],
    }
    for value in repl.run(step_fn):
        assert value.numpy().tolist() == expected[method]
    assert [c.tolist() for c in helpers.components(v)] == [expected[method]] * len(
        v.components
    )


def test_an_op_that_writes_copies_alone_has_the_variable_mirrored() -> None:
    repl = _replicator("apart", 2)
    with repl.context():
        v = tf.Variable([1.0, 2.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))

    def step_fn() -> None:
        optimizer.apply([v * 1.0], [v])
        tf.raw_ops.AssignAddVariableOp(
            resource=v.handle, value=repl.all_reduce(tf.ones([2]))
        )

    for expected in ([2.0, 2.0], [2.0, 2.0]):
        repl.run(step_fn)
        assert [c.tolist() for c in helpers.components(v)] == [expected] * 2
        assert v.numpy().tolist() == expected
    assert v.owner is None
    assert "written by an op" in repl.plan.notes[0]


def test_what_xla_compiles_has_the_variable_mirrored() -> None:
    repl = _replicator("apart", 2)
    with repl.context():
        v = tf.Variable([1.0, 2.0])
    double = tf.function(lambda: v * 2.0, jit_compile=True)
    assert [x.numpy().tolist() for x in repl.run(lambda: double())] == [[2.0, 4.0]] * 2
    assert v.owner is None
    v.assign([5.0, 6.0])
    assert v.numpy().tolist() == [5.0, 6.0]
    assert [x.numpy().tolist() for x in repl.run(lambda: double())] == [[10, 12]] * 2


def test_a_step_that_fails_leaves_copies_equal() -> None:
    repl = _replicator("apart", 2)
    with repl.context():
        v = tf.Variable([1.0, 2.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        fails = tf.Variable(True)

    def step_fn() -> None:
        optimizer.apply([v * 1.0], [v])
        tf.debugging.assert_equal(fails, repl.replica_id == 0)

    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(step_fn)
    assert [c.tolist() for c in helpers.components(v)] == [[1.0, 2.0]] * 3


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_a_read_behind_a_conditional_is_of_before_the_update(owner: int) -> None:
    repl = helpers.make(3, strategy=On(f"CPU:{owner}", local_replication=True))
    with repl.context():
        v = tf.Variable([1.0, 2.0], name="v")
        sgd = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))

    def step_fn() -> tf.Tensor:
        chosen = tf.cond(tf.size(v) > 1, lambda: v * 3.0, lambda: v)
        reads = tf.stack([chosen, v.read_value() + 0.0])
        sgd.apply_gradients([(tf.ones([2]), v)])
        return reads

    for k in range(2):  # a step subtracts 0.5
        before = np.float32([1.0, 2.0]) - 0.5 * k
        for reads in repl.run(step_fn):
            np.testing.assert_allclose(reads, [before * 3, before])
    np.testing.assert_allclose(v.numpy(), [0.0, 1.0])
