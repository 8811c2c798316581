# SPDX-License-Identifier: Apache-2.0
"""What ops depend on, by inputs alone or also by control inputs."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph.ir import walk


def test_upstream_ends_where_nothing_is_waited_for() -> None:
    with tf.Graph().as_default():
        one, other, apart = (
            tf.constant(1.0, name=n) for n in ("one", "other", "apart")
        )
        with tf.control_dependencies([other]):
            total = tf.add(one, one, name="total")
        end = tf.negative(total, name="end")
        assert walk.upstream([end.op]) == {end.op, total.op, one.op, other.op}
        by_value = walk.upstream([end.op, apart.op], walk.computed_from)
        assert by_value == {end.op, total.op, one.op, apart.op}
        assert walk.waits_for(total.op) == [one.op, one.op, other.op]
        assert walk.upstream([]) == set()


def test_upstream_of_what_stands_for_ops() -> None:
    sources = {0: [], 1: [0, 0], 2: [1], 3: [3, 2]}
    assert walk.upstream([2], sources.__getitem__) == {0, 1, 2}
    assert walk.upstream([3], sources.__getitem__) == {0, 1, 2, 3}


def test_upstream_stays_among_some_ops() -> None:
    sources = {0: [], 1: [0], 2: [1], 3: [2]}
    assert walk.upstream([3, 0], sources.__getitem__, {1, 3, 0}) == {3, 0}


@pytest.mark.parametrize("seed", range(5))
def test_each_comes_after_what_it_depends_on(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sources = {n: [*map(int, rng.integers(0, n, 3))] if n else [] for n in range(30)}
    roots = [29, 7, 20]
    ordered = walk.in_order(roots, sources.__getitem__)
    assert set(ordered) == walk.upstream(roots, sources.__getitem__)
    assert len(ordered) == len({*ordered})
    place = {op: k for k, op in enumerate(ordered)}
    assert all(place[one] < place[op] for op in ordered for one in sources[op])
    assert {*walk.in_order(roots, sources.__getitem__, {7, 20})} == {7, 20}
