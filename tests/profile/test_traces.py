# SPDX-License-Identifier: Apache-2.0
"""Ops of real steps are traced, with their communications, in control flow too."""

from __future__ import annotations

import pytest
import tensorflow as tf

import replicator
from replicator.profile import traces


def _top(repl, x):
    return repl.all_gather(repl.all_reduce(x))


def _loop(repl, x):
    turn = lambda n, x: (n + 1, repl.all_reduce(x, "mean") * 0.5)  # noqa: E731
    x = tf.while_loop(lambda n, x: n < 3, turn, [tf.constant(0), x])[1]
    return repl.all_reduce(x, "max")


def _branch(repl, x):
    total = tf.reduce_sum(repl.all_reduce(x))
    return tf.cond(total > 0, lambda: repl.all_reduce(x), lambda: repl.broadcast(x))


def _nested(repl, x):
    inner = tf.function(lambda x: repl.all_reduce(x) + repl.all_gather(x)[: x.shape[0]])
    return inner(inner(x))


def _gradient(repl, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = repl.all_reduce(x * x)
    return y + tape.gradient(y, x)


@pytest.mark.parametrize("program", [_top, _loop, _branch, _nested, _gradient])
@pytest.mark.parametrize("build", ["trace", "clone"])
def test_each_communication_that_happens_is_found(program, build):
    repl = replicator.Replicator(["CPU:0", "CPU:1"], build=build)
    step = repl.build(lambda: program(repl, tf.random.uniform([300])))
    plan = step.plan
    scopes = [row.scope for row in plan]
    assert len(set(scopes)) == len(scopes)
    step()
    ran = traces.trace(step, plan, 1)
    actual = {op.row for op in ran}
    happen = set(range(len(plan)))
    if program is _branch:  # the other branch is not taken
        (other,) = [n for n, row in enumerate(plan) if row.primitive == "broadcast"]
        happen.discard(other)
    assert actual - {None} == happen
    assert {0, 1} <= {op.replica_id for op in ran}
    assert all(0 <= op.own_seconds <= op.seconds for op in ran)
