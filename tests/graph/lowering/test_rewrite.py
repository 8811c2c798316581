# SPDX-License-Identifier: Apache-2.0
"""The graph of a step after its build."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.graph.ir import placeholder
from tests import helpers


def _build(
    repl: replicator.Replicator, step: Callable[[], Any], kind: str
) -> tuple[tf.Graph, Any]:
    """Returns the graph of a step, traced or of a session, and the step's results."""
    if kind == "session":
        with tf.Graph().as_default() as graph:
            return graph, repl.run(step)
    results = []

    @tf.function
    def traced() -> None:
        results.append(repl.run(step))

    return traced.get_concrete_function().graph, results[0]


def _before(op: tf.Operation) -> Iterable[tf.Operation]:
    return [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def _ancestors(starts: Iterable[tf.Operation]) -> set[tf.Operation]:
    result: set[tf.Operation] = set()
    waiting = list(starts)
    while waiting:
        op = waiting.pop()
        if op not in result:
            result.add(op)
            waiting += _before(op)
    return result


def _devices(ops: Iterable[tf.Operation]) -> set[str]:
    return {op.device for op in ops if op.device}


def _step(repl: replicator.Replicator) -> Callable[[], Any]:
    """A step that communicates by all primitives, with gradients of gradients."""

    def step() -> Any:
        x = helpers.opaque([1.0 + repl.replica_id, 2.0])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = repl.all_reduce(x, "max") * repl.all_reduce(x) ** 2
                y = repl.broadcast(y, repl.num_replicas - 1) + x**3
                y = repl.all_gather(y, axis=0) + tf.reduce_sum(repl.all_gather(y) ** 2)
                loss = tf.reduce_sum(repl.all_reduce(y, "prod"))
            d = tape.gradient(loss, x)
        return loss, d, outer.gradient(d, x)

    return step


@pytest.mark.parametrize("kind", ["function", "session"])
def test_no_placeholder_has_a_consumer(kind: str) -> None:
    repl = helpers.make(3)
    graph, results = _build(repl, _step(repl), kind)
    ours = {op for op in graph.get_operations() if placeholder.read(op) is not None}
    assert len(ours) > 30
    for op in graph.get_operations():
        assert not ours.intersection(_before(op)), op.name
    reached = _ancestors(t.op for t in tf.nest.flatten(results))
    assert not ours & reached


@pytest.mark.parametrize("kind", ["function", "session"])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_the_reduction_is_one_op_fed_by_every_replica(
    num_replicas: int, kind: str
) -> None:
    repl = helpers.make(num_replicas)

    def step() -> tf.Tensor:
        return repl.all_reduce(helpers.opaque([1.0, 2.0]) * 3.0) + 1.0

    graph, results = _build(repl, step, kind)
    shared = [_ancestors([result.op]) for result in results]
    common = set.intersection(*shared)
    assert _devices(common) == set(repl.devices)
    sums = [op for op in common if op.type == "AddN"]
    (total,) = [op for op in sums if _devices(_ancestors([op])) == set(repl.devices)]
    assert total.device in repl.devices
    # Its own inputs, past partial sums, are one Mul in each replica's sub-graph.
    feeds = [op for op in _ancestors([total]) if op.type == "Mul"]
    assert sorted(op.device for op in feeds) == sorted(repl.devices)
    for feed in feeds:
        assert _devices(_ancestors([feed])) == {feed.device}
    # Each replica reads it on its own device.
    for device, result in zip(repl.devices, results, strict=True):
        assert result.device == device
        assert total in _ancestors([result.op])


def test_a_reduction_is_shared_and_not_repeated_by_replica() -> None:
    repl = helpers.make(4, algorithm="hub")
    graph, _ = _build(repl, lambda: repl.all_reduce(helpers.opaque([1.0])), "function")
    assert sum(op.type == "AddN" for op in graph.get_operations()) == 4 - 1


def test_large_reductions_are_spread_over_the_devices() -> None:
    repl = helpers.make(4, algorithm="hub")

    def step() -> Any:
        return repl.all_reduce([helpers.opaque(tf.ones([40_000])) for _ in range(8)])

    graph, _ = _build(repl, step, "function")
    hubs = [op.device for op in graph.get_operations() if op.type == "AddN"]
    assert all(hubs.count(device) == 2 * (4 - 1) for device in repl.devices)


@pytest.mark.parametrize("kind", ["function", "session"])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_what_a_call_waits_for_every_result_waits_for(
    num_replicas: int, name: str, kind: str
) -> None:
    """A placeholder can be the only carrier of the user's control_dependencies."""
    repl = helpers.make(num_replicas, build="trace")
    gates, after = [], []

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0)
        gates.append(tf.no_op(name="gate"))
        with tf.control_dependencies([gates[-1]]):
            y = getattr(repl, name)(x)
        with tf.control_dependencies([y]):
            after.append(tf.no_op(name="after"))
        return y

    _, results = _build(repl, step, kind)
    for result, late in zip(results, after, strict=True):
        assert set(gates) <= _ancestors([result.op])
        assert set(gates) <= _ancestors([late])


def test_control_dependencies_order_effects_across_replicas() -> None:
    """Replica 0 prints before the sum, and thus before anyone prints after it."""
    repl = helpers.make(2)
    log: list[str] = []

    def note(text: str) -> tf.Operation:
        def write() -> None:
            log.append(text)

        return tf.py_function(write, [], [])

    def step() -> tf.Tensor:
        r = repl.replica_id
        x = helpers.opaque(1.0)
        with tf.control_dependencies([note(f"before {r}")]):
            total = repl.all_reduce(x)
        with tf.control_dependencies([total]):
            note(f"after {r}")
        return total

    run = repl.build(step)
    for _ in range(5):
        log.clear()
        run()
        assert set(log[:2]) == {"before 0", "before 1"}
        assert set(log[2:]) == {"after 0", "after 1"}


@pytest.mark.parametrize("mode", helpers.MODES)
def test_gradients_that_wait_for_one_another_crosswise_are_an_error(mode: str) -> None:
    """They cannot run: each of the two communications needs the other's result."""
    repl = helpers.make(2)

    def step() -> Any:
        x, y = helpers.opaque(1.0), helpers.opaque(2.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, y])
            a, b = repl.all_reduce(x), repl.all_reduce(y)
        if repl.replica_id == 0:
            dx = tape.gradient(a, x)
            return dx, tape.gradient(b, y, output_gradients=dx)
        dy = tape.gradient(b, y)
        return tape.gradient(a, x, output_gradients=dy), dy

    with pytest.raises((tf.errors.InvalidArgumentError, replicator.ReplicatorError)):
        helpers.run(mode, repl, lambda: step)


def test_builds_into_one_graph_do_not_meet() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():
        first = repl.run(lambda: repl.all_reduce(helpers.opaque(1.0)))
        second = repl.run(lambda: repl.all_reduce(helpers.opaque(10.0)))
        with tf.compat.v1.Session() as session:
            assert session.run([*first, *second]) == [2.0, 2.0, 20.0, 20.0]
