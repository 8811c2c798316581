# SPDX-License-Identifier: Apache-2.0
"""Plans to test with: of a step that communicates everywhere, and made up."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import replicator
from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering.record import Link
from replicator.plan import Plan, Row
from tests import helpers

_PLACES = [
    ((), 1),
    (("loop body",), 8),
    (("function inner", "conditional (true)"), None),
    (("loop body", "function cell"), None),
]


def everywhere(repl: replicator.Replicator) -> Callable[[], Any]:
    """Returns a step that communicates at the top, in loops, and in a nested cond."""

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        def positive() -> tf.Tensor:
            return repl.broadcast(x, root=1)  # in the cond

        return tf.cond(tf.reduce_sum(x) > 0.0, positive, lambda: x)

    def counted(n: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return n + 1, repl.all_reduce(y)  # in the counted loop

    def other(y: tf.Tensor) -> tuple[tf.Tensor]:
        return (y + repl.all_gather(y)[0],)  # in the other loop

    def step() -> Any:
        x = helpers.opaque([1.0 + repl.replica_id, 2.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x, "mean")  # at the top
            _, y = tf.while_loop(lambda n, y: n < 6, counted, [0, y])
            y = inner(y)
            (y,) = tf.while_loop(lambda y: tf.reduce_sum(y) < 1000.0, other, [y])
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)  # the gradients

    return step


def made_up(count: int, num_replicas: int, seed: int = 0) -> Plan:
    """Returns a plan of random rows, the last third of them backward."""
    choose = random.Random(seed)
    rows = []
    for n in range(count):
        members = choose.sample(
            range(num_replicas), choose.randint(min(2, num_replicas), num_replicas)
        )
        group = tuple(sorted(members))
        path, times = choose.choice(_PLACES)
        nbytes = choose.choice([8, 1234, 10**7, None])
        primitive = choose.choice(["all_reduce", "broadcast", "all_gather", "message"])
        rows.append(
            Row(
                primitive=primitive,
                reduction="sum" if primitive == "all_reduce" else "",
                options={"root": group[0]} if primitive == "broadcast" else {},
                group=group,
                operands=tuple((Value("float32", (None, 3)),) for _ in group),
                links=tuple(Link(group[0], other, nbytes) for other in group[1:]),
                algorithm="direct",
                path=path,
                times=times,
                lines=("train.py:42 in step_fn",),
                backward=n >= 2 * count / 3,
            )
        )
    return Plan(tuple(rows), tuple(f"/device:CPU:{r}" for r in range(num_replicas)))
