# SPDX-License-Identifier: Apache-2.0
"""Replicas' values, weighted by their shares, add up to one device's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.autodist import stamping
from replicator.autodist.kinds import SAME, Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.shares import Plan, Shares
from replicator.world import World
from tests.autodist.test_session import scope

v1 = tf.compat.v1
WORLD = World(3, (0, 1, 2), ("/CPU:0", "/CPU:1", "/CPU:2"))
X = np.float32([1, 2, 4, 5, 8])  # two for each replica except the last
PARTS = [X[:2], X[2:4], X[4:]]


class _Copies:
    """Copies of a graph of examples x for three replicas, and their shares.

    Args:
        make: Returns the results computed from the examples.
    """

    def __init__(self, make: Callable[[tf.Tensor], Any]) -> None:
        with tf.Graph().as_default() as graph:
            x = v1.placeholder(tf.float32, [None])
            self.made = make(x)
            self.plan = Plan(Program(graph, []))
        stamp = stamping.Stamp(graph, graph.get_operations())
        with tf.Graph().as_default() as self.graph:
            self.shares = Shares(WORLD)
            self.places = [
                stamp.press(self.graph, f"r{r}/", lambda t: t, lambda op: "", {})
                for r in WORLD.local
            ]
        self._fed = {
            own[x.op].outputs[0]: part
            for own, part in zip(self.places, PARTS, strict=True)
        }

    def run(self, made: Any, are_split: bool = True) -> Any:
        """Returns values, with the parts' shares, or equal ones if nothing is split."""
        fed = dict(self._fed)
        for n, part in enumerate(PARTS if are_split else ()):
            fed[self.shares.shares[n]] = len(part) / len(X)
            fed[self.shares.parts[n]] = 1.0
        with v1.Session(graph=self.graph) as session:
            return session.run(made, fed)

    def weighed(self, tensor: tf.Tensor, value: Value) -> float:
        """Returns the weighted sum of a tensor over all replicas."""
        with self.graph.as_default():
            values = [
                stamping.of(places, tensor)
                * self.shares.weight(None, value, self.places, n)
                for n, places in enumerate(self.places)
            ]
        return float(sum(self.run(values)))


POWERS: dict[float, Callable[[Any], Any]] = {
    0: tf.reduce_mean,
    1: tf.reduce_sum,
    0.5: lambda x: tf.reduce_sum(x) / tf.sqrt(tf.cast(tf.size(x), tf.float32)),
    2: lambda x: tf.reduce_sum(x) * tf.cast(tf.size(x), tf.float32),
}


@pytest.mark.parametrize("power", POWERS)
def test_what_is_weighed_adds_up_to_that_of_all(power: float) -> None:
    copies = _Copies(POWERS[power])
    actual = copies.weighed(copies.made, Value(Kind.MEAN, power))
    np.testing.assert_allclose(actual, POWERS[power](tf.constant(X)), rtol=1e-6)


def test_means_of_some_weigh_by_how_many_are_left() -> None:
    def some(x: Any) -> Any:
        return tf.reduce_mean(tf.boolean_mask(x, x > 1.5))

    copies = _Copies(some)
    value = copies.plan.kinds.of(copies.made)
    assert value.kind is Kind.RATIO and value.over is not None
    assert copies.weighed(copies.made, value) == some(X)


def test_values_of_the_whole_batch_are_joined_or_computed() -> None:
    def make(x: Any) -> Any:
        return [tf.reduce_mean(x), tf.sqrt(tf.reduce_sum(x)), tf.sort(-x), x[0]]

    copies = _Copies(make)
    with copies.graph.as_default():
        whole = [
            copies.shares.joined(one, copies.plan, copies.places, 1)
            for one in copies.made
        ]
    for actual, expected in zip(copies.run(whole), make(X), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    shuffled = _Copies(lambda x: tf.random.shuffle(x)[0])
    with (
        shuffled.graph.as_default(),
        pytest.raises(errors.UnsupportedError, match=r"(?s)is unknown.*test_shares"),
    ):
        shuffled.shares.whole(shuffled.made, shuffled.plan, shuffled.places, 0)


def test_where_nothing_is_split_all_weigh_alike() -> None:
    copies = _Copies(tf.reduce_sum)
    for power in POWERS:
        with copies.graph.as_default():
            weights = [
                copies.shares.weight(*(None, Value(Kind.MEAN, power), copies.places, n))
                for n in WORLD.local
            ]
        np.testing.assert_allclose(copies.run(weights, False), [1 / 3] * 3)


def _plan(autodist: Any) -> Plan:
    return Plan(Program(v1.get_default_graph(), autodist._scope.variables))


def test_gradients_of_one_call_are_reduced_together() -> None:
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None, 2])
        w, b = tf.Variable([[1.0], [2.0]], name="w"), tf.Variable(1.0, name="b")
        table = tf.Variable(tf.ones([3, 1]), name="table")
        loss = tf.reduce_mean(x @ w + b + tf.gather(table, [0]))
        tf.gradients(loss, [w, b, table])
        tf.gradients(2.0 * loss, [b])
        plan = _plan(autodist)
    names = [sorted(one.variable for one in group) for group in plan.gradients]
    assert sorted(names, key=len) == [["b"], ["b", "table", "w"]]
    sizes = {one.variable: len(one.ops) for one in plan.gradients[0]}
    assert sizes.get("table", 2) == 2 and sizes["b"] == 1


def test_what_is_differentiated_is_known_from_where_that_starts() -> None:
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        w = tf.Variable(2.0, name="w")
        tf.gradients(tf.reduce_sum(w * x), [w])
        tf.gradients(w * w, [w])
        tf.gradients(tf.reduce_mean(x * x), [x])  # of no variable
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(w * x)
        tape.gradient(loss, w)
        plan = _plan(autodist)
    actual = [(loss.kind, loss.power) for _, loss in plan.starts]
    mean, total = (Kind.MEAN, 0), (Kind.MEAN, 1)
    assert actual == [total, (Kind.SAME, 0), mean, mean]
    behind = [plan.loss_behind(one) for group in plan.gradients for one in group]
    assert [begun for _, begun in behind] == [True] * 3
    assert [loss.power for loss, _ in behind] == [1, 0, 0]
    assert behind[1][0] == SAME


def test_writes_are_those_of_what_differs_and_initialize_nothing() -> None:
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        v, n = tf.Variable(1.0, name="v"), tf.Variable(1.0, name="n")
        differs = v.assign(tf.reduce_sum(x))
        n.assign_add(2.0)
        n.assign_sub(tf.gradients(tf.reduce_mean(n * x), [n])[0])
        plan = _plan(autodist)
        (write,) = plan.writes
    assert write.op.inputs[0].op.name.startswith("v")
    assert (write.value.kind, write.value.power) == (Kind.MEAN, 1)
    assert differs.op is not None


def test_examples_that_are_dealt_are_counted_by_what_has_rows() -> None:
    with tf.Graph().as_default() as graph:
        data = tf.data.Dataset.range(5).batch(2)
        data = tf.data.Dataset.zip((tf.data.Dataset.range(9), data))
        number, rows = v1.data.make_one_shot_iterator(data).get_next()
        plan, source = Plan(Program(graph, [])), rows.op
        assert plan.source(tf.add(rows, 1).op) is None  # it was added later
        assert plan.source(source) is source and number.op is source
        shares = Shares(World(1, (0,), ("/CPU:0",)))
        places = [{source: source}]
        counts = shares.counts(source, places)
        assert shares.counts(source, places) is counts
        with v1.Session() as session:
            assert [session.run(counts) for _ in range(3)] == [[2], [2], [1]]


LOSSES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "a mean": lambda x, w: tf.reduce_mean((x * w - 1.0) ** 2),
    "a sum": lambda x, w: tf.reduce_sum((x * w - 1.0) ** 2),
    "linear": lambda x, w: w * tf.reduce_mean(x),
    "of some": lambda x, w: tf.reduce_mean(tf.boolean_mask(x * w, x > 1.0)),
}


@pytest.mark.parametrize("batch", [2, 3])  # the replicas are dealt 2 and 2, or 3 and 1
@pytest.mark.parametrize("by_tape", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_weigh_by_the_examples_that_were_dealt(
    name: str, by_tape: bool, batch: int
) -> None:
    loss = LOSSES[name]
    examples = X[:4]
    with scope(2) as autodist:
        data = tf.data.Dataset.from_tensor_slices(examples).batch(batch)
        x = v1.data.make_one_shot_iterator(data).get_next()
        w = v1.get_variable("w", initializer=3.0)
        if by_tape:
            with tf.GradientTape() as tape:
                target = loss(x, w)
            train_op = w.assign_sub(0.1 * tape.gradient(target, w))
        else:
            target = loss(x, w)
            train_op = v1.train.GradientDescentOptimizer(0.1).minimize(target)
        session = autodist.create_distributed_session()
        value, _ = session.run([target, train_op])
        trained = session.run(w)
    plain = tf.Variable(3.0)
    with tf.GradientTape() as tape:
        expected = loss(tf.constant(examples), plain)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(
        trained, 3.0 - 0.1 * tape.gradient(expected, plain), rtol=1e-5
    )
