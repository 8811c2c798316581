# SPDX-License-Identifier: Apache-2.0
"""The law of the rules of conditionals, loops and functions, and of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from replicator.forms import engine
from replicator.forms.forms import Sharded
from replicator.forms.propagate import GraphPlan, Scope
from replicator.forms.rule import OpPlan
from replicator.forms.rules import control_flow
from tests import helpers
from tests.forms import laws
from tests.forms.laws import Inputs, Sample

W = np.array([[0.5, -0.2, 0.1], [0.3, 0.4, -0.6], [-0.1, 0.2, 0.7]], np.float32)


def cell(x: Any) -> tf.Tensor:
    return tf.tanh(x @ W)


def looped(v: Inputs) -> tf.Tensor:
    """A value of each row, changed by turns."""
    return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, cell(y)), (0, v.x))[1]


def communicating(v: Inputs) -> tf.Tensor:
    """A loop whose body needs all rows, and so does the condition."""

    def center(y: tf.Tensor) -> tf.Tensor:
        return 0.7 * cell(y) - 0.1 * tf.reduce_mean(y, 0)

    return tf.while_loop(lambda y: tf.reduce_mean(y**2) > 0.05, center, (v.x,))[0]


def carrying_sums(v: Inputs) -> tf.Tensor:
    """A loop whose value becomes a sum over the rows in the first turn."""

    def add(i: tf.Tensor, y: tf.Tensor) -> Any:
        return i + 1, y + tf.reduce_sum(tf.sin(v.x * y), 0)

    return tf.while_loop(lambda i, y: i < 2, add, (0, tf.ones([3])))[1]


def swapped(v: Inputs) -> tf.Tensor:
    """A loop whose values change places, of which one is of each row."""

    def body(i: tf.Tensor, a: tf.Tensor, b: tf.Tensor) -> Any:
        return i + 1, b, a * 0.5

    first = (0, tf.broadcast_to(W[0], tf.shape(v.x)), v.x)
    return tf.concat(tf.while_loop(lambda i, a, b: i < 3, body, first)[1:], 1)


def mapped(v: Inputs) -> tf.Tensor:
    """A function of each row."""
    return tf.map_fn(lambda row: tf.reduce_sum(cell(row[None]), 0), v.x)


def over_time(v: Inputs) -> tf.Tensor:
    """A function of each time step of all rows."""
    x = tf.transpose(v("x", 2, 3), [1, 0, 2])
    return tf.transpose(tf.map_fn(lambda step: cell(step) * step, x), [1, 0, 2])


def scanned(v: Inputs) -> tf.Tensor:
    x = tf.transpose(v("x", 2, 3), [1, 0, 2])
    return tf.scan(lambda a, step: tf.tanh(a @ W + step), x, tf.zeros_like(x[0]))


def branched(v: Inputs) -> tf.Tensor:
    return tf.cond(
        tf.reduce_sum(v.x) > 0, lambda: cell(v.x), lambda: tf.sin(v.x @ W) * 2.0
    )


def of_other_forms(v: Inputs) -> tf.Tensor:
    """Branches whose results, and what they keep for gradients, are of other forms."""

    def whole() -> tf.Tensor:
        mean = tf.sin(tf.reduce_mean(v.x, 0))
        return tf.tanh(mean)[None] * tf.ones_like(v.x)

    return tf.cond(tf.reduce_sum(v.x) > 0, lambda: tf.sin(cell(v.x)), whole)


def of_cases(v: Inputs) -> tf.Tensor:
    which = tf.shape(v.x)[0] % 3
    branches = [lambda: cell(v.x), lambda: tf.sin(v.x) @ W, lambda: v.x**2]
    return tf.switch_case(which, branches)


def branches_in_a_loop(v: Inputs) -> tf.Tensor:
    def body(i: tf.Tensor, y: tf.Tensor) -> Any:
        def sine() -> tf.Tensor:
            return tf.sin(y @ W) * tf.reduce_mean(tf.cos(y))

        return i + 1, tf.cond(tf.equal(i % 2, 0), lambda: cell(y), sine)

    return tf.while_loop(lambda i, y: i < 3, body, (0, v.x))[1]


def lists_of_branches(v: Inputs) -> tf.Tensor:
    array = tf.TensorArray(tf.float32, 2, element_shape=[None, 3])
    array = array.write(0, v.x)
    array = tf.cond(
        tf.reduce_sum(v.x) > 0,
        lambda: array.write(1, cell(v.x)),
        lambda: array.write(1, tf.sin(v.x)),
    )
    return array.stack()


def chosen_in_a_branch(v: Inputs) -> tf.Tensor:
    """A number of rows that only one branch knows of."""

    def some() -> tf.Tensor:
        return tf.reduce_sum(tf.boolean_mask(v.x, v.x[:, 0] > 0) ** 2)

    return tf.cond(tf.shape(v.x)[0] > 1, some, lambda: 0.0)


def of_other_lengths(v: Inputs) -> tf.Tensor:
    """Branches that return other numbers of rows."""
    is_large = tf.reduce_sum(v.x) > 0
    chosen = tf.cond(is_large, lambda: tf.boolean_mask(v.x, v("b")), lambda: v.x)
    twice = tf.cond(is_large, lambda: tf.concat([v.x, v.y], 0), lambda: v.x)
    return tf.reduce_sum(chosen**2) + tf.reduce_sum(tf.sort(twice, 0) * twice)


def called(v: Inputs) -> tf.Tensor:
    function = tf.function(cell)
    return function(function(v.x))


def with_own_gradient(v: Inputs) -> tf.Tensor:
    @tf.custom_gradient
    def clipped(x: tf.Tensor) -> Any:
        return tf.sin(x), lambda upstream: tf.clip_by_norm(upstream, 1.0)

    return tf.function(clipped)(v.x)


def growing(v: Inputs) -> tf.Tensor:
    """A loop whose value has more rows in each turn."""
    shapes = tf.TensorShape([]), tf.TensorShape([None, 3])
    double = lambda i, y: (i + 1, tf.concat([y, tf.sin(y)], 0))  # noqa: E731
    return tf.while_loop(lambda i, y: i < 2, double, (0, v.x), shapes)[1]


LOOPS = [
    growing,
    looped,
    communicating,
    carrying_sums,
    swapped,
    mapped,
    over_time,
    scanned,
]
BRANCHES = [
    *(branched, of_other_forms, of_cases, branches_in_a_loop, lists_of_branches),
    *(chosen_in_a_branch, of_other_lengths, called, with_own_gradient),
]


def twice(program: Callable[[Inputs], tf.Tensor]) -> Callable[[Inputs], Any]:
    """Returns a program that returns first and second derivatives of another."""

    def derivatives(v: Inputs) -> Any:
        key = ("x", 2, 3) if program in (over_time, scanned) else None
        x = v(*key) if key else v.x
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_sum(tf.sin(program(v)))
            first = tape.gradient(loss, x)
            if first is None:  # the law only asks which inputs there are
                return loss
            norm = tf.reduce_sum(first**2)
        return first, outer.gradient(norm, x)

    return derivatives


def _plans(plan: GraphPlan) -> Iterator[tuple[tf.Operation, OpPlan]]:
    for op, one in plan.plans.items():
        yield op, one
        for body in one.bodies:
            yield from _plans(body)


@pytest.mark.parametrize("loop", [False, True])
def test_control_flow_of_tensorflow_1_is_refused_with_the_way_out(loop: bool) -> None:
    with helpers.v1_control_flow(), tf.Graph().as_default():
        if loop:
            end = tf.compat.v1.while_loop(lambda x: x < 9, lambda x: x + 1, [0])
        else:
            end = tf.compat.v1.cond(tf.constant(True), lambda: 1, lambda: 2)
        with pytest.raises(
            errors.UnsupportedError,
            match=r"(?s)of TensorFlow 1.*at \S*test_control_flow.py:\d+ in .*"
            r"Fix: .*enable_control_flow_v2\(\).*input pipeline",
        ):
            Scope().extend(GraphPlan(), [end.op])


def _written_in_bodies(v: tf.Variable) -> Any:
    def step(x: tf.Tensor) -> Any:
        def turn(i: tf.Tensor, y: tf.Tensor) -> Any:
            v.assign_add(tf.reduce_mean(y, 0))
            return i + 1, tf.sin(y) * v

        y = tf.while_loop(lambda i, y: i < 2, turn, (0, x))[1]
        is_large = tf.reduce_sum(y) > 0
        tf.cond(is_large, lambda: v.assign(v * 2.0), lambda: v.assign(v - 1.0))
        which = tf.cast(is_large, tf.int32)
        branches = [lambda: v.assign_sub([1.0, 2.0, 3.0]), lambda: v.assign_add(v)]
        tf.switch_case(which, branches)
        tf.function(lambda: v.assign_add(v * v))()
        return y + v

    return step


def test_effects_of_bodies() -> None:
    repl = replicator.Replicator(["cpu:0", "cpu:1"])
    plain = tf.Variable(W[0])
    with repl.context():
        variable = tf.Variable(W[0])
    spec = tf.TensorSpec([None, 3])
    run = engine.WholeBatchFunction(_written_in_bodies(variable), repl, [spec])
    alone = tf.function(_written_in_bodies(plain))
    for count in (5, 2):
        x = laws.Batch(count).make("x", (3,))
        np.testing.assert_allclose(run(x), alone(x), 1e-5)
        np.testing.assert_allclose(variable, plain, 1e-5)
    found = {op.type for op, _ in _plans(run.program((0,)).plan)}
    assert {"While", "If", "Case", "StatefulPartitionedCall"} <= found


def test_values_keep_their_forms() -> None:
    law = laws.Law([Sample(one.__name__, one) for one in (*LOOPS, *BRANCHES)], 2)
    plan = law._on_replicas.program((0,) * len(law._keys)).plan
    found = dict.fromkeys(laws.ruled(control_flow), 0)
    for op, its in _plans(plan):
        is_sharded = any(isinstance(fact.form, Sharded) for fact in its.makes)
        if op.type in found and is_sharded:
            found[op.type] += 1
    pure = "StatelessWhile StatelessIf StatelessCase PartitionedCall"
    assert all(found[one] for one in pure.split()), found
