# SPDX-License-Identifier: Apache-2.0
"""What the plan says is sent, and what TensorFlow sends when it runs the step."""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import strategy
from replicator._tf import graphs
from replicator.plan import Plan
from tests import helpers

_LEAST = 50  # elements; scalars, indices and control signals are smaller
_STRATEGIES: dict[str, Any] = {
    "sharded": None,
    "PS": strategy.PS(),
    "PS with proxies": strategy.PS(local_proxy_variable=True),
    "PartitionedPS": strategy.PartitionedPS(),
    "mirrored": strategy.AllReduce(),
}
_OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
    "momentum": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: tf.keras.optimizers.Adam(0.1),
    "clipped": lambda: tf.keras.optimizers.SGD(0.1, global_clipnorm=1.0),
}


def _sent(graph: tf.Graph, fetches: Any, replicas: int) -> int:
    """Runs the ops; returns the bytes of all larger tensors that left a device."""
    config = graphs.session_config()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    metadata = tf.compat.v1.RunMetadata()
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(fetches, options=options, run_metadata=metadata)
    total = 0
    for partition in metadata.partition_graphs:
        for node in partition.node:
            if node.op == "_Send" and "/ctrl/" not in node.input[0]:
                name = node.input[0]
                sent = graph.get_tensor_by_name(name if ":" in name else f"{name}:0")
                if sent.shape.num_elements() >= _LEAST:
                    total += sent.shape.num_elements() * sent.dtype.size
    return total


def _trained(
    replicas: int, optimizer: Callable[[], Any], embeds: bool = False, **options: Any
) -> tuple[Plan, int]:
    """Builds a training step; returns its plan, and the bytes that it sends."""
    with tf.Graph().as_default() as graph:
        devices = [f"CPU:{r}" for r in range(replicas)]
        repl = replicator.Replicator(devices, **options)
        with repl.context():
            variables = [tf.Variable(tf.ones(s)) for s in ([64, 100], [100])]
            if embeds:
                variables.append(tf.Variable(tf.ones([1000, 16])))
            wrapped = repl.wrap_optimizer(optimizer())
            wrapped.build(variables)

        def step_fn() -> tf.Tensor:
            x = tf.random.uniform([8, 64])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ variables[0] + variables[1]) ** 2)
                if embeds:
                    loss += tf.reduce_sum(tf.gather(variables[2], [1, 2, 3, 5]))
            gradients = tape.gradient(loss, variables[:2])
            wrapped.apply_gradients(zip(gradients, variables[:2], strict=True))
            return loss

        losses = repl.run(step_fn)
        return repl.plan, _sent(graph, losses, replicas)


@pytest.fixture(autouse=True)
def _no_slices() -> None:
    """Leaves out what counts sent tensors, where an algorithm may cut them up."""
    if helpers.make(2)._settings.options.algorithm is not None:
        pytest.skip("an algorithm is named by --with")


@pytest.mark.battery(3)
@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("optimizer", _OPTIMIZERS)
@pytest.mark.parametrize("name", _STRATEGIES)
def test_rows_and_reads_are_what_is_sent(
    name: str, optimizer: str, replicas: int
) -> None:
    kind = _STRATEGIES[name]
    options = {"variables": "sharded"} if kind is None else {"strategy": kind}
    plan, sent = _trained(replicas, _OPTIMIZERS[optimizer], **options)
    assert sent > 0
    assert plan.totals.per_step.nbytes + (plan.pulled or 0) == sent


def test_only_the_rows_of_lookups_are_read() -> None:
    _, without = _trained(2, _OPTIMIZERS["sgd"], variables="sharded")
    plan, sent = _trained(2, _OPTIMIZERS["sgd"], variables="sharded", embeds=True)
    assert plan.totals.per_step.nbytes + (plan.pulled or 0) == sent
    assert sent - without == 4 * 16 * 4


@pytest.mark.parametrize("name", ["mirrored", "PS with proxies"])
def test_nothing_is_read_from_others_where_all_have_it(name: str) -> None:
    plan, _ = _trained(2, _OPTIMIZERS["adam"], strategy=_STRATEGIES[name])
    assert plan.pulled == 0
    text = io.StringIO()
    plan.print(text)
    assert "Not in the rows" not in text.getvalue()


def test_reads_are_printed_and_saved() -> None:
    plan, _ = _trained(2, _OPTIMIZERS["sgd"], variables="sharded")
    text = io.StringIO()
    plan.print(text)
    assert plan.pulled == 4 * (64 * 100 + 100)
    assert "Not in the rows: 25.4 KiB per step" in text.getvalue()
    assert Plan.from_json(plan.to_json()) == plan


def test_a_size_that_is_unknown() -> None:
    with tf.Graph().as_default():
        repl = replicator.Replicator(["CPU:0", "CPU:1"], strategy=strategy.PS())
        with repl.context():
            table = tf.Variable(tf.ones([10, 4]))
            wrapped = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))
            wrapped.build([table])

        def step_fn() -> None:
            rows = tf.where(tf.random.uniform([5]) > 0.5)[:, 0]
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, rows))
            wrapped.apply_gradients([(tape.gradient(loss, table), table)])

        repl.run(step_fn)
        assert repl.plan.pulled is None


class _Late(tf.Module):
    """Creates its variables when first called, and then uses one of them."""

    used: Any = None

    def __call__(self) -> tf.Tensor:
        if self.used is None:
            self.unused = [tf.Variable(tf.ones([3])) for _ in range(3)]
            self.used = tf.Variable(tf.ones([4]))
        return self.used.read_value()


@pytest.mark.parametrize("variables", ["auto", "sharded"])
def test_a_step_creates_and_restores_variables_that_it_does_not_use(
    variables: Any, tmp_path: pathlib.Path
) -> None:
    saved = _Late()
    saved()
    saved.used.assign(tf.fill([4], 2.0))
    path = tf.train.Checkpoint(module=saved).save(str(tmp_path / "ckpt"))
    restored = _Late()
    status = tf.train.Checkpoint(module=restored).restore(path)
    repl = replicator.Replicator(["CPU:0", "CPU:1"], variables=variables)
    for value in repl.run(restored):
        np.testing.assert_array_equal(value, [2.0] * 4)
    status.assert_existing_objects_matched()


@pytest.mark.parametrize("variables", ["auto", "sharded"])
def test_a_variable_is_read_while_a_step_is_built_and_not_in_it(variables: Any) -> None:
    repl = replicator.Replicator(["CPU:0", "CPU:1"], variables=variables)
    with repl.context():
        v = tf.Variable(tf.ones([3]))

    def step_fn() -> Any:
        with tf.init_scope():
            return repl.replica_id + v.numpy()[0]

    assert [float(x) for x in repl.run(step_fn)] == [1, 2]
