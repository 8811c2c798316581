# SPDX-License-Identifier: Apache-2.0
"""The graph of a step after its build."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import tensorflow as tf

from tests import helpers


def _devices(ops: Iterable[tf.Operation]) -> set[str]:
    return {op.device for op in ops if op.device}


@pytest.mark.parametrize("kind", ["function", "session"])
@pytest.mark.parametrize("num_replicas", [2, 4])
def test_the_reduction_is_one_op_fed_by_every_replica(
    num_replicas: int, kind: str
) -> None:
    repl = helpers.make(num_replicas)

    def step() -> tf.Tensor:
        return repl.all_reduce(helpers.opaque([1.0, 2.0]) * 3.0) + 1.0

    graph, results = helpers.built(repl, step, kind)
    shared = [set(helpers.ops_run([result.op])) for result in results]
    common = set.intersection(*shared)
    assert _devices(common) == set(repl.devices)
    sums = [op for op in common if op.type == "AddN"]
    (total,) = [
        op for op in sums if _devices(helpers.ops_run([op])) == set(repl.devices)
    ]
    assert total.device in repl.devices
    # Its own inputs, past partial sums, are one Mul in each replica's sub-graph.
    feeds = [op for op in helpers.ops_run([total]) if op.type == "Mul"]
    assert sorted(op.device for op in feeds) == sorted(repl.devices)
    for feed in feeds:
        assert _devices(helpers.ops_run([feed])) == {feed.device}
    # Each replica reads it on its own device.
    for device, result in zip(repl.devices, results, strict=True):
        assert result.device == device
        assert total in helpers.ops_run([result.op])


def test_a_reduction_is_shared_and_not_repeated_by_replica() -> None:
    repl = helpers.make(4, algorithm="hub")
    graph, _ = helpers.built(
        repl, lambda: repl.all_reduce(helpers.opaque([1.0])), "function"
    )
    assert sum(op.type == "AddN" for op in graph.get_operations()) == 4 - 1


def test_large_reductions_are_spread_over_the_devices() -> None:
    repl = helpers.make(4, algorithm="hub")

    def step() -> Any:
        return repl.all_reduce([helpers.opaque(tf.ones([40_000])) for _ in range(8)])

    graph, _ = helpers.built(repl, step, "function")
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

    _, results = helpers.built(repl, step, kind)
    for result, late in zip(results, after, strict=True):
        assert set(gates) <= set(helpers.ops_run([result.op]))
        assert set(gates) <= set(helpers.ops_run([late]))
