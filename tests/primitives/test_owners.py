# SPDX-License-Identifier: Apache-2.0
"""Reductions whose results are needed on one replica each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.graph.ir.placeholder import OperandPolicy
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


@pytest.mark.battery(3)
@pytest.mark.parametrize(
    ("op", "weighted"), [("sum", False), ("mean", False), ("mean", True)]
)
def test_owners_change_no_value(op: str, weighted: bool) -> None:
    repl = helpers.make(3)

    def step_fn(owners: Any) -> Any:
        policies = owners and [OperandPolicy(owner=owner) for owner in owners]
        weight = float(repl.replica_id) if weighted else None
        reduced = all_reduce.combine(_handed_in(repl.replica_id), op, weight, policies)
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
        policies = [OperandPolicy(owner=owner) for owner in (1, 2, 1, 2, 1, 2)]
        return all_reduce.reduce_dense(mine, "sum", policies=policies)

    with tf.Graph().as_default() as graph:
        repl.run(step_fn)
        for op in graph.get_operations():
            if op.type in ("AddN", "AddV2") and op.name.startswith("communicate"):
                devices.add(op.device)
    assert devices == {repl.devices[1], repl.devices[2]}


@pytest.mark.parametrize(
    ("field", "found"),
    [
        ("owner", "not the same owner of tensor 1"),
        ("algorithm", "not the same algorithm of tensor 1"),
        ("bucket", "not the same bucket of tensor 1"),
        ("variable", "tensor 1 is not of the same variable"),
    ],
)
def test_replicas_must_agree_on_the_policies(field: str, found: str) -> None:
    repl = helpers.make(2)
    values = {
        "owner": (0, 1),
        "algorithm": ("tree", "ring"),
        "bucket": ("a", "b"),
        "variable": ("v", "w"),
    }[field]

    def step_fn() -> Any:
        policies = [
            OperandPolicy(),
            OperandPolicy(**{field: values[repl.replica_id]}),
        ]
        return all_reduce.reduce_dense([tf.zeros([])] * 2, "sum", policies=policies)

    with pytest.raises(replicator.MismatchError, match=found):
        repl.run(step_fn)


def test_each_operand_goes_its_own_way() -> None:
    """In one call, by its own algorithm, and with the others of its bucket."""
    repl = helpers.make(3)

    def step_fn(policies: Any) -> Any:
        mine = [tf.fill([2, 2], repl.replica_id + 1.0 + k) for k in range(6)]
        return all_reduce.reduce_dense(mine, "sum", policies=policies)

    ways = [("ring", ""), ("tree", ""), ("ring", ""), (None, "a"), (None, "b")]
    policies = [OperandPolicy(algorithm=how, bucket=name) for how, name in ways]
    got = repl.run(lambda: step_fn([*policies, OperandPolicy(algorithm="tree")]))
    (row,) = repl.plan
    assert sorted(row.algorithm.split(", ")) == ["hub", "ring", "tree"]
    want = repl.run(lambda: step_fn(None))
    for one, other in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        np.testing.assert_array_equal(one, other)
