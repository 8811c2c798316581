# SPDX-License-Identifier: Apache-2.0
"""Builders that need more facts decide when a step is built, and variables move."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.strategy import (
    AllReduceSynchronizer,
    Builder,
    Node,
    Parallax,
    PSSynchronizer,
    RandomAxisPartitionAR,
    Sharded,
)
from tests import helpers

DEVICE = "/job:localhost/replica:0/task:0/device:CPU:"


class LargestFirst(Builder):
    """Puts the largest variable on the last device, whatever the order."""

    def __init__(self, proxies: bool = False) -> None:
        self.proxies = proxies

    def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
        facts = list(variables)
        largest = max(facts, key=lambda v: v.nbytes, default=None)
        for variable in facts:
            how: Any = AllReduceSynchronizer("RING")
            if variable is largest:
                how = PSSynchronizer(resources.devices[-1], self.proxies)
            yield Node(variable.path, how)


def _language_model(repl: replicator.Replicator, optimizer: Any) -> Any:
    """Returns a step_fn with a sparse and a dense gradient, and its variables."""
    table = tf.Variable(tf.reshape(tf.range(12.0), [6, 2]) / 10, name="table")
    kernel = tf.Variable([[0.5], [-0.25]], name="kernel")
    wrapped = repl.wrap_optimizer(optimizer)

    def step_fn() -> Any:
        ids = tf.constant([1, 3]) + repl.replica_id
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.gather(table, ids) @ kernel) ** 2)
        gradients = tape.gradient(loss, [table, kernel])
        wrapped.apply_gradients(zip(gradients, [table, kernel], strict=True))
        return loss

    return step_fn, (table, kernel, wrapped)


def _trained(mode: str, repl: Any) -> tuple[Any, list[Any]]:
    """Trains a language model; returns the losses and the variables."""
    variables: list[Any] = []

    def make_step() -> Any:
        step_fn, variables[:] = _language_model(repl, tf.keras.optimizers.Adam(0.1))
        return step_fn

    return helpers.run(mode, repl, make_step, steps=3), variables


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
def test_parallax_moves_what_has_sparse_gradients(mode: str, variables: str) -> None:
    results = []
    for strategy in (Parallax(), None):
        repl = helpers.make(3, variables=variables, strategy=strategy)
        result, (table, kernel, optimizer) = _trained(mode, repl)
        results.append(result)
        if strategy is None or mode == "session":
            continue
        assert (table.owner, kernel.owner) == (0, None)
        slots = {v.path: v.value.owner for v in optimizer.variables}
        for path, owner in slots.items():
            assert owner == (0 if "table" in path else None), slots
        node = repl.strategy.node("kernel")
        assert node == Node("kernel", AllReduceSynchronizer())
        helpers.assert_replicas_equal([kernel])
    for one, two in zip(*map(tf.nest.flatten, results), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6)


@pytest.mark.parametrize("proxies", [False, True])
def test_a_builder_that_looks_ahead_decides_at_the_first_build(proxies: bool) -> None:
    repl = helpers.make(2, variables="mirrored", strategy=LargestFirst(proxies))
    with repl.context():
        small = tf.Variable([1.0], name="small")
        large = tf.Variable([1.0, 2.0], name="large")
    assert (small.owner, large.owner) == (None, None)
    steps: list[Any] = [repl.build(lambda: small * large)]
    large.assign([3.0, 4.0])
    small.assign_add([1.0])
    for value in steps[0]():
        assert value.numpy().tolist() == [6.0, 8.0]
    assert (small.owner, large.owner) == (None, 1)
    assert small.description.synchronizer.spec == "RING"
    devices = [c.device for c in large.components]
    assert devices == ([*repl.devices] if proxies else [repl.devices[1]] * 2)
    assert large.numpy().tolist() == [3.0, 4.0]
    large.assign([5.0, 6.0])  # through its new handle
    assert tf.reduce_sum(large).numpy() == 11.0
    for value in steps[0]():
        assert value.numpy().tolist() == [10.0, 12.0]


def test_steps_that_were_called_before_are_traced_again() -> None:
    repl = helpers.make(2, variables="mirrored", strategy=Parallax())
    with repl.context():
        step_fn, (table, kernel, _) = _language_model(
            repl, tf.keras.optimizers.SGD(0.5, momentum=0.9)
        )

    def look() -> Any:
        return tf.reduce_sum(table) + tf.reduce_sum(kernel)

    before = repl.run(look)  # no gradients: nothing is decided
    assert table.owner is None and table.description.undecided
    repl.run(step_fn)
    assert table.owner == 0 and not table.description.undecided
    after = repl.run(look)
    expected = tf.reduce_sum(table) + tf.reduce_sum(kernel)
    assert float(before[0]) != float(after[0])
    for value in after:
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_variables_that_come_later_are_decided_on_later() -> None:
    repl = helpers.make(2, variables="mirrored", strategy=Parallax(chunk_size=1))
    owners = []
    with repl.context():
        first, variables = _language_model(repl, tf.keras.optimizers.SGD(0.5))
    repl.run(first)
    with repl.context():
        second, others = _language_model(repl, tf.keras.optimizers.SGD(0.5))
    repl.run(second)
    owners = [v.owner for v in (*variables[:2], *others[:2])]
    assert owners == [0, None, 1, None]  # balanced with the previous ones
    assert others[1].description.synchronizer.group == 1


def test_variables_without_gradients_stay_undecided() -> None:
    repl = helpers.make(2, variables="mirrored", strategy=Parallax())
    with repl.context():
        step_fn, (table, _, _) = _language_model(repl, tf.keras.optimizers.SGD(0.5))
        other = tf.Variable([1.0], name="other")
    repl.run(step_fn)
    assert table.owner == 0
    assert other.description.undecided and other.owner is None


def test_rules_wait_each_for_itself() -> None:
    rules = {"table": Parallax(), "kernel": Sharded()}
    repl = helpers.make(2, variables="mirrored", strategy=rules)
    with repl.context():
        step_fn, (table, kernel, _) = _language_model(
            repl, tf.keras.optimizers.SGD(0.5)
        )
    assert (table.owner, kernel.owner) == (None, 0)
    repl.run(step_fn)
    assert (table.owner, kernel.owner) == (0, 0)


def test_what_was_built_before_keeps_a_variable_where_it_is() -> None:
    repl = helpers.make(2, variables="mirrored", strategy=Parallax())
    with repl.context():
        step_fn, (table, _, _) = _language_model(repl, tf.keras.optimizers.SGD(0.5))
    read = tf.function(lambda: tf.reduce_sum(table))
    read()
    with pytest.raises(
        replicator.StrategyError,
        match="(?s)table.*Owned.*relies on where it is.*built before at.*"
        "Fix: build this",
    ):
        repl.run(step_fn)


@pytest.mark.parametrize("order", ["before", "behind"])
def test_savers_of_moved_variables(order: str, tmp_path: pathlib.Path) -> None:
    path = str(tmp_path / "model")
    with tf.Graph().as_default(), helpers.session() as session:
        repl = helpers.make(2, variables="mirrored", strategy=Parallax())
        with repl.context():
            step_fn, (table, kernel, _) = _language_model(
                repl, tf.compat.v1.train.AdagradOptimizer(0.5)
            )
        if order == "before":
            tf.compat.v1.train.Saver([table, kernel])
            with pytest.raises(replicator.StrategyError, match="relies on where it is"):
                repl.run(step_fn)
            return
        losses = repl.run(step_fn)
        saver = tf.compat.v1.train.Saver([table, kernel])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(losses)
        saver.save(session, path)
        values = session.run([table, kernel])
        session.run(losses)
        assert session.run(table).tolist() != values[0].tolist()
        saver.restore(session, path)
        for one, two in zip(session.run([table, kernel]), values, strict=True):
            np.testing.assert_array_equal(one, two)
        assert session.run(table.is_initialized())


def test_checkpoints_of_moved_variables(tmp_path: pathlib.Path) -> None:
    repl = helpers.make(2, variables="mirrored", strategy=Parallax())
    with repl.context():
        step_fn, (table, _, optimizer) = _language_model(
            repl, tf.keras.optimizers.Adam(0.5)
        )
    checkpoint = tf.train.Checkpoint(table=table, optimizer=optimizer)
    repl.run(step_fn)
    path = checkpoint.write(str(tmp_path / "moved"))
    values = [table.numpy(), *(v.numpy() for v in optimizer.variables)]
    first = [x.numpy() for x in repl.run(step_fn)]
    checkpoint.read(path).assert_consumed()
    for one, two in zip(
        [table.numpy(), *(v.numpy() for v in optimizer.variables)], values, strict=True
    ):
        np.testing.assert_array_equal(one, two)
    assert first[0].shape == ()


def test_a_builder_that_only_reads_facts_does_not_wait() -> None:
    class Fails(Builder):
        def nodes(self, variables, resources):  # type: ignore[no-untyped-def]
            for variable in variables:
                try:
                    sparse = bool(variable.sparse)
                except Exception:  # an unknown fact raises a BaseException
                    sparse = True
                yield Node(variable.path, AllReduceSynchronizer(group=int(sparse)))

    repl = helpers.make(2, variables="mirrored", strategy=Fails())
    with repl.context():
        step_fn, (table, kernel, _) = _language_model(
            repl, tf.keras.optimizers.SGD(0.5)
        )
    repl.run(step_fn)
    groups = [v.description.synchronizer.group for v in (table, kernel)]
    assert groups == [1, 0]


@pytest.mark.battery(3)
@pytest.mark.parametrize("mode", helpers.MODES)
def test_variables_are_put_in_parts_when_their_gradients_are_known(mode: str) -> None:
    results = []
    for strategy in (RandomAxisPartitionAR(seed=2), None):
        repl = helpers.make(2, variables="mirrored", strategy=strategy)
        result, (table, kernel, optimizer) = _trained(mode, repl)
        results.append(result)
        if strategy is None or mode == "session":
            continue
        assert [(v.layout.axis, v.layout.sizes) for v in (table, kernel)] == [
            (0, (3, 3)),
            (0, (1, 1)),
        ]
        slots = [v.value for v in optimizer.variables if "table" in v.path]
        assert [(v.layout.axis, v.layout.sizes) for v in slots] == [(0, (3, 3))] * 2
        nodes = repl.strategy.by_name
        assert [len(nodes[name].parts) for name in ("table", "kernel")] == [2, 2]
        table.assign(table * 2.0)
        np.testing.assert_allclose(repl.run(lambda table=table: table + 0.0)[1], table)
        helpers.assert_replicas_equal([*table.parts, *kernel.parts])
    for one, two in zip(*map(tf.nest.flatten, results), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)


def _kernel_and_bias(repl: replicator.Replicator, size: int) -> list[tf.Variable]:
    """Returns variables that wait for a decision; a bias of size 1 stays whole."""
    with repl.context():
        kernel = tf.Variable(tf.ones([4, 2]), name="kernel")
        return [kernel, tf.Variable(tf.ones([size]), name="bias")]


@pytest.mark.parametrize("size", [1, 4])
def test_the_strategy_in_force_is_told_before_and_after_a_later_decision(
    size: int, tmp_path: pathlib.Path
) -> None:
    """Also for variables that could be split, and were not."""
    repl = helpers.make(2, variables="mirrored", strategy=RandomAxisPartitionAR())
    variables = _kernel_and_bias(repl, size)
    with repl.context():
        wrapped = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))
    assert [node.parts for node in repl.strategy.nodes] == [(), ()]
    repl.run(lambda: wrapped.apply(list(map(tf.ones_like, variables)), variables))
    strategy = repl.strategy
    counts = [len(node.parts) for node in strategy.nodes]
    assert counts == [2, 0 if size == 1 else 2]
    assert "bias" in str(strategy)
    strategy.save(tmp_path / "strategy.pb")
    again = helpers.make(2, strategy=tmp_path / "strategy.pb")
    variables = _kernel_and_bias(again, size)
    assert again.strategy == strategy


def test_a_variable_that_is_not_split_is_not_called_split() -> None:
    repl = helpers.make(2, variables="mirrored", strategy=RandomAxisPartitionAR())
    kernel, bias = _kernel_and_bias(repl, 1)
    with repl.context():
        wrapped = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))
    repl.run(lambda: wrapped.apply([tf.ones([4, 2]), tf.ones([1])], [kernel, bias]))
    compiled = tf.function(lambda: bias + 1.0, jit_compile=True)
    with pytest.raises(replicator.UnsupportedError, match="can split it.*XLA"):
        repl.run(lambda: compiled())


def test_a_builder_that_divides_later_says_so() -> None:
    class Silent(RandomAxisPartitionAR):
        may_divide = False

    repl = helpers.make(2, variables="mirrored", strategy=Silent())
    with repl.context():
        step_fn, _ = _language_model(repl, tf.keras.optimizers.SGD(0.5))
    with pytest.raises(
        replicator.StrategyError, match="(?s)in 2 parts.*created whole.*may_divide"
    ):
        repl.run(step_fn)


def test_printing_facts_does_not_postpone_a_decision() -> None:
    class Logging(replicator.strategy.PartitionedPS):
        def nodes(self, variables: Any, resources: Any) -> Any:
            def logged() -> Any:
                for facts in variables:
                    lines.append(f"{facts} {resources}")
                    yield facts

            yield from super().nodes(logged(), resources)

    lines: list[str] = []
    repl = helpers.make(2, strategy=Logging())
    with repl.context():
        table = tf.Variable(tf.ones([4, 2]), name="table")
    assert len(table.parts) == 2
    assert "'table'" in lines[0] and "sparse=None" in lines[0]


def test_what_was_built_before_keeps_parts_where_they_are() -> None:
    repl = helpers.make(2, variables="mirrored", strategy=RandomAxisPartitionAR())
    with repl.context():
        step_fn, (table, _, _) = _language_model(repl, tf.keras.optimizers.SGD(0.5))
    total = tf.function(lambda: tf.reduce_sum(table))
    total()
    with pytest.raises(
        replicator.StrategyError, match="(?s)table.*in 2 parts.*built before"
    ):
        repl.run(step_fn)
    del total  # a function that is gone needs no whole table
    repl.run(step_fn)
    assert len(table.parts) == 2


class Rows(tf.keras.layers.Layer):
    """Looks rows up by tf.gather, as users' layers do."""

    def build(self, _: Any) -> None:
        self.table = self.add_weight(shape=(6, 2), name="table")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.table.value, ids)


@pytest.mark.parametrize("strategy", [Parallax(), RandomAxisPartitionAR(seed=2)])
def test_functional_models_are_built_before_their_first_step(strategy: Any) -> None:
    repl = helpers.make(2, variables="mirrored", strategy=strategy)
    with repl.context():
        inputs = tf.keras.Input([3], dtype="int32")
        outputs = tf.keras.layers.Dense(1)(Rows()(inputs))
        model = tf.keras.Model(inputs, outputs)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))
    table = model.trainable_variables[0].value

    def step_fn() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.constant([[0, 1, 5]])) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    losses = [float(repl.run(step_fn)[0]) for _ in range(3)]
    assert losses[2] < losses[0]
    whole = isinstance(strategy, Parallax)
    assert table.owner == 0 if whole else len(table.parts) == 2
