"""Reductions whose results are needed on one replica each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.primitives import all_reduce
from tests import helpers

ROWS = {0: [0, 3], 1: [3], 2: []}


def _handed_in(replica_id: int) -> list[Any]:
    """Returns two dense gradients, a sparse one, and another two of one shape."""
    rng = np.random.RandomState(replica_id)
    rows = tf.constant(ROWS[replica_id], tf.int64)
    values = tf.constant(rng.randn(len(ROWS[replica_id]), 2), tf.float32)
    dense = [helpers.opaque(rng.randn(3).astype(np.float32)) for _ in range(4)]
    slices = tf.IndexedSlices(values, rows, tf.constant([4, 2], tf.int64))
    return [*dense[:2], slices, *dense[2:]]


@pytest.mark.parametrize(
    ("op", "weighted"), [("sum", False), ("mean", False), ("mean", True)]
)
def test_owners_change_no_value(op: str, weighted: bool) -> None:
    repl = helpers.make(3)

    def step_fn(owners: Any) -> Any:
        weight = float(repl.replica_id) if weighted else None
        reduced = all_reduce.combine(_handed_in(repl.replica_id), op, weight, owners)
        return [tf.convert_to_tensor(gradient) for gradient in reduced]

    got = repl.run(lambda: step_fn([2, 0, 1, 2, None]))
    want = repl.run(lambda: step_fn(None))
    for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()


def test_the_hub_of_a_bucket_is_its_owners_device() -> None:
    devices = set()
    repl = helpers.make(3)

    def step_fn() -> Any:
        mine = [tf.zeros([5]) + float(repl.replica_id) for _ in range(6)]
        return all_reduce.reduce_dense(mine, "sum", owners=[1, 2, 1, 2, 1, 2])

    with tf.Graph().as_default() as graph:
        repl.run(step_fn)
        for op in graph.get_operations():
            if op.type in ("AddN", "AddV2") and op.name.startswith("communicate"):
                devices.add(op.device)
    assert devices == {repl.devices[1], repl.devices[2]}


def test_replicas_must_agree_on_the_owners() -> None:
    repl = helpers.make(2)
    with pytest.raises(replicator.MismatchError, match="not the same owners"):
        repl.run(
            lambda: all_reduce.reduce_dense(
                [tf.zeros([])], "sum", owners=[repl.replica_id]
            )
        )
