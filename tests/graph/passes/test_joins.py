# SPDX-License-Identifier: Apache-2.0
"""Parts that several replicas read are joined once per shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import tensorflow as tf

from replicator.graph.passes import joins
from tests import helpers

Join = Callable[[Sequence[tf.Tensor]], tf.Tensor]


def _joined_as_the_first(joined: Join, near: Sequence[Sequence[int]]) -> list[bool]:
    """Makes three replicas join two parts; returns whose results became the first's."""
    with tf.Graph().as_default() as graph:
        reads = [tf.Variable([k, k]).value() for k in (1.0, 2.0)]
        groups, results = [], []
        for k in range(3):
            start = len(graph.get_operations())
            value = tf.concat(reads, 0) if k < 2 else joined(reads)
            results.append(tf.abs(value))
            groups.append(graph.get_operations()[start:])
        used = [result.op.inputs[0] for result in results]
        count = joins.share(groups, near, set())
        same = [result.op.inputs[0] is used[0] for result in results]
        assert count == sum(same) - 1
        return same


def _identities(reads: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.identity(read) for read in reads], 0)


@pytest.mark.parametrize("joined", [lambda reads: tf.concat(reads, 0), _identities])
def test_those_that_share_memory_join_once(joined: Join) -> None:
    assert _joined_as_the_first(joined, [[0, 1, 2]]) == [True, True, True]
    assert _joined_as_the_first(joined, [[0, 2]]) == [True, False, True]
    assert _joined_as_the_first(joined, []) == [True, False, False]


def _waiting(reads: Sequence[tf.Tensor]) -> tf.Tensor:
    with tf.control_dependencies([tf.no_op()]):
        return tf.concat(reads, 0)


@pytest.mark.parametrize(
    "joined",
    [
        lambda reads: tf.concat(reads[::-1], 0),
        lambda reads: tf.concat([reads[0], -reads[1]], 0),
        lambda reads: tf.concat([*reads, reads[0]], 0),
        lambda reads: tf.concat(reads, helpers.opaque(0)),
        _waiting,
    ],
)
def test_what_is_joined_otherwise_stays(joined: Join) -> None:
    assert _joined_as_the_first(joined, [[0, 1, 2]]) == [True, True, False]
