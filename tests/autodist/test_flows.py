# SPDX-License-Identifier: Apache-2.0
"""The ops of a graph that differ between replicas: along paths of random graphs."""

from __future__ import annotations

import random
from collections.abc import Callable

import tensorflow as tf

from replicator.autodist import flows


def _random_graph(rng: random.Random, count: int) -> list[tf.Operation]:
    """Returns ops, each of which uses some of those before it."""
    with tf.Graph().as_default():
        ops = [tf.zeros([2]) for _ in range(3)]
        for _ in range(count):
            one, other = rng.choice(ops), rng.choice(ops)
            kind = rng.choice(["add", "neg", "like"])
            if kind == "add":
                ops.append(tf.raw_ops.AddV2(x=one, y=other))
            else:
                make = tf.raw_ops.Neg if kind == "neg" else tf.raw_ops.ZerosLike
                ops.append(make(x=one))
        return [tensor.op for tensor in ops]


def _reaches(ops: list[tf.Operation], op: tf.Operation) -> set[tf.Operation]:
    """Returns all ops on which one depends, including itself, by brute force."""
    reached, before = {op}, set()
    while reached != before:
        before = set(reached)
        reached |= {t.op for one in before for t in one.inputs}
    return reached


def _of(given: dict[tf.Operation, str]) -> Callable[[tf.Operation], str]:
    return lambda op: given.get(op, "")


def test_upstream_is_all_that_is_needed_in_an_order_to_compute_it() -> None:
    rng = random.Random(0)
    for _ in range(20):
        ops = _random_graph(rng, 15)
        expected = rng.sample(ops, 2)
        closed = set(rng.sample(ops, 3))
        tensors = [op.outputs[0] for op in expected]
        actual = flows.upstream(tensors, lambda op: False)
        assert set(actual) == set.union(*(_reaches(ops, op) for op in expected))
        places = {op: k for k, op in enumerate(actual)}
        assert len(places) == len(actual)
        assert all(places[t.op] < places[op] for op in actual for t in op.inputs)
        ended = set(flows.upstream(tensors, closed.__contains__))
        assert ended <= set(actual) and closed & set(actual) <= ended | closed
        assert all(t.op in ended for op in ended if op not in closed for t in op.inputs)


def test_what_differs_is_behind_what_each_replica_has_of_its_own() -> None:
    rng = random.Random(1)
    for _ in range(20):
        ops = _random_graph(rng, 15)
        given = {op: rng.choice(["value", "shape"]) for op in rng.sample(ops[:3], 2)}
        same = set(rng.sample(ops[3:], 2))  # received with the same value by all
        actual = flows.flow(ops, _of(given), same.__contains__)
        for op in ops:
            sources = [t.op for t in op.inputs]
            differs = op in given or any(s in actual.differing for s in sources)
            assert (op in actual.differing) == (differs and op not in same)
            value = given.get(op) == "value" or (
                op.type not in flows.SHAPES
                and any(s in actual.by_value for s in sources)
            )
            assert (op in actual.by_value) == (value and op not in same)
        assert actual.by_value <= actual.differing


def test_random_numbers_are_found_in_functions_too() -> None:
    with tf.Graph().as_default() as graph:
        draw = tf.random.uniform([2])
        plain = draw + 1.0
        called = tf.function(lambda: tf.random.normal([]))()
        quiet = tf.function(lambda: tf.zeros([2]) * 2.0)()
        asked = tf.numpy_function(lambda: 1.0, [], tf.float64)
        assert any(flows.draws(op) for op in graph.get_operations())
    calls = [
        next(op for op in _back(x) if op.type.endswith("Call")) for x in (called, quiet)
    ]
    assert [flows.draws(op) for op in calls] == [True, False]
    assert flows.draws(asked.op) and not flows.draws(plain.op)


def _back(tensor: tf.Tensor) -> list[tf.Operation]:
    return flows.upstream([tensor], lambda op: False)
