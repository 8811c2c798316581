# SPDX-License-Identifier: Apache-2.0
"""Each row states the synchronizer of its variables."""

from __future__ import annotations

import io
from typing import Any

import tensorflow as tf

from replicator.plan import Plan
from replicator.strategy import PS, AllReduce, PSLoadBalancing
from tests import helpers


def _plan(strategy: Any) -> Plan:
    repl = helpers.make(2, strategy=strategy)
    with repl.context():
        variables = [tf.Variable([1.0] * 4, name=f"v{k}") for k in range(3)]
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))

    def step_fn() -> Any:
        optimizer.apply([v * 1.0 for v in variables], variables)
        return repl.all_reduce(1.0)

    return repl.build(step_fn).plan


def test_rows_say_the_synchronizers_of_variables() -> None:
    synchronizers = {
        "groups": (AllReduce(chunk_size=2), ["all-reduce group 0, all-reduce group 1"]),
        "servers": (PSLoadBalancing(), ["PS 0, PS 1"]),
        "copies": (PS(local_proxy_variable=True), ["PS 0", ""]),
    }
    for strategy, expected in synchronizers.values():
        plan = _plan(strategy)
        assert [row.synchronizer for row in plan] == [*expected, ""]
        assert Plan.from_json(plan.to_json()) == plan
        text = io.StringIO()
        plan.print(text)
        assert expected[0].split(", ")[0] in text.getvalue()
    old = plan.to_json().replace('"synchronizer"', '"unknown"')
    assert [row.synchronizer for row in Plan.from_json(old)] == ["", "", ""]


def test_sharded_variables_have_servers() -> None:
    repl = helpers.make(2, variables="sharded")
    with repl.context():
        v = tf.Variable([[1.0]])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
    plan = repl.build(lambda: optimizer.apply([v * 1.0], [v])).plan
    assert [row.synchronizer for row in plan] == ["PS 0"]
