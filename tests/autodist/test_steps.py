# SPDX-License-Identifier: Apache-2.0
"""A session has a step for each combination of fetches and feeds, built once."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist.helpers import scope

v1 = tf.compat.v1
X = np.arange(14, dtype=np.float32).reshape(7, 2)


def _size(session: Any) -> int:
    """Returns how many ops the graph of all replicas has."""
    return len(session._steps.graph.get_operations())


def test_a_combination_is_built_once_and_the_users_graph_stays_as_it_was() -> None:
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None, 2], "x")
        w = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
        loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
        train = v1.train.AdamOptimizer(0.1).minimize(loss)
        session = autodist.create_distributed_session()
        before = session.graph.as_graph_def(add_shapes=True)
        sizes = []
        for feed in (X, X[:4], X[:5] + 1, X.tolist()):
            session.run([loss, train], {x: feed})
            sizes.append(_size(session))
        assert len(set(sizes)) == 1
        session.run({"loss": "x:0", "other": train}, {"x:0": X})  # another
        assert _size(session) > sizes[0]
        sizes = [_size(session)]
        for fetches in ([loss, train], (loss, [train]), {"a": loss, "b": train.name}):
            session.run(fetches, {"x:0": X})
            sizes.append(_size(session))
        assert len(set(sizes)) == 1
        assert session.graph.as_graph_def(add_shapes=True) == before


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_threads_run_the_same_session(num_replicas: int) -> None:
    with scope(num_replicas) as autodist:
        x = v1.placeholder(tf.float32, [None], "x")
        total = tf.Variable(0.0)
        add = total.assign_add(tf.reduce_sum(x)).op
        rows = [x * k for k in range(4)]
        session = autodist.create_distributed_session()

        def run(k: int) -> Any:
            feed = {x: np.arange(5.0) + k}
            session.run(add, feed)
            return session.run(rows[k % 4], feed)

        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, range(12)))
        for k, rows_of_k in enumerate(found):
            np.testing.assert_allclose(rows_of_k, (np.arange(5.0) + k) * (k % 4))
        assert session.run(total) == sum(10 + 5 * k for k in range(12))
