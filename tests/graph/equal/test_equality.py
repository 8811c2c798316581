# SPDX-License-Identifier: Apache-2.0
"""Equal values where the replicas' loops and branches capture different ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator import ContextError
from tests import helpers


def _in_a_loop(body: Callable[[], Any]) -> None:
    tf.while_loop(lambda i: i < 2, lambda i: (body(), i + 1)[1:], [0])


def _in_a_branch(body: Callable[[], Any]) -> None:
    condition = tf.constant(1.0) > tf.random.stateless_uniform([], [1, 2])
    tf.cond(condition, lambda: (body(), 0)[1], lambda: 0)


PLACES = {"loop": _in_a_loop, "branch": _in_a_branch}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("more", [False, True], ids=["another order", "more"])
def test_replicas_may_capture_otherwise(place: str, more: bool) -> None:
    """The equality of written values follows the captures, whatever their order."""
    repl = helpers.make(2)
    with repl.context():
        a, b, c = (tf.Variable([1.0, 2.0], name=name) for name in "abc")

    def step_fn(equal: bool) -> None:
        noise = tf.random.normal([2])
        gradient = repl.all_reduce(noise)

        def body() -> None:
            if repl.replica_id:
                a.assign(b + noise if more else gradient + noise)
            else:
                a.assign(a if more else noise + gradient)
            value = c + gradient if equal else noise
            tf.raw_ops.AssignVariableOp(resource=c.handle, value=value)

        PLACES[place](body)

    repl.run(lambda: step_fn(True))
    helpers.assert_replicas_equal([a, b, c])
    with pytest.raises(
        ContextError, match=r"(?s)writes variable c:0 by Assign.*differ"
    ):
        repl.run(lambda: step_fn(False))
