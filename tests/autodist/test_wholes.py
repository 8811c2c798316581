# SPDX-License-Identifier: Apache-2.0
"""Values computed from the whole batch before their use: which, and where."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import wholes
from replicator.autodist.wholes import Whole
from replicator.graph.ir import switching

v1 = tf.compat.v1


def test_what_depends_on_a_variable_is_trained_but_behind_a_stop() -> None:
    with tf.Graph().as_default():
        x = v1.placeholder(tf.float32, [None])
        w = v1.get_variable("w", initializer=1.0, use_resource=True)
        rows = tf.gather(v1.get_variable("t", [3], use_resource=True), [0, 1])
        for trained in (w * x, rows, tf.function(lambda: w * 2.0)()):
            assert wholes.is_trained(trained)
            stopped = tf.stop_gradient(trained) + 1.0
            assert wholes.is_trained(stopped)
            assert not wholes.is_trained(stopped, wholes.STOPS)
        assert not wholes.is_trained(tf.reduce_mean(x))


def test_only_numbers_of_a_known_shape_may_be_of_the_whole_batch() -> None:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None])
        kinds = [tf.reduce_sum(x), tf.shape(x)[0], x, tf.sort(x)[:2]]
        with_own = tf.grad_pass_through(lambda one: one / 2.0)(tf.reduce_sum(x))
        uses = [(one + one).op for one in kinds]
        actual = [wholes.may_be(op, 0, switching.NONE) for op in uses]
        ended = switching.Flow(graph.get_operations())
        assert [wholes.may_be(op, 0, ended) for op in uses] == actual
    assert actual[:3] == [True, False, False]
    assert with_own.op.type == "IdentityN"
    before = Whole(next(t.op for t in with_own.op.inputs), 0)
    assert wholes.is_closed(with_own.op, 0, before)
    assert not wholes.is_closed(with_own.op, 0, Whole(kinds[0].op, 0))


def test_operands_that_are_one_tensor_are_together_in_one_order() -> None:
    with tf.Graph().as_default():
        total, other = tf.constant(1.0) + 0.0, tf.constant(2.0) + 0.0
        one, two, three = 1.0 / total, total / other, 3.0 / other
        operands = [Whole(one.op, 1), Whole(two.op, 0), Whole(three.op, 1)]
        actual = wholes.by_tensor(operands)
        assert actual is not None
        assert [len(several) for several in actual.values()] == [2, 1]
        assert list(actual) == list(wholes.by_tensor(operands[::-1]) or ())
        assert wholes.by_tensor([Whole(one.op, 1), Whole(two.op, 0, 1.0)]) is None


def test_gradients_use_a_tensor_behind_their_start() -> None:
    with tf.Graph().as_default():
        x, by = v1.placeholder(tf.float32, []), v1.placeholder(tf.float32, [])
        quotient, unrelated = tf.square(x) / by, by * 3.0
        start = tf.ones([])
        (gradient,) = tf.gradients(quotient, [x], [start])
        actual = wholes.in_gradients(by, {start.op})
        between = wholes.between(by, [gradient.op])
        assert {op.type for op, _ in actual} == {"RealDiv"}
        assert {quotient.op, unrelated.op}.isdisjoint(op for op, _ in actual)
        assert set(between) - {(quotient.op, 1)} <= set(actual)  # none is left out
        assert unrelated.op not in dict(between)
        wholes.put(by * 2.0, [(quotient.op, 1), *actual])
        with v1.Session() as session:
            values = session.run([quotient, gradient], {x: 3.0, by: 4.0})
    np.testing.assert_allclose(values, [9 / 8, 6 / 8])


@pytest.mark.parametrize("power", [0.0, 1.0, 0.5])
def test_what_is_put_in_a_place_grows_with_the_share_and_is_never_lost(power) -> None:
    whole = tf.constant(6.0)
    for share in (0.25, 1.0):
        actual = wholes.scaled(whole, power, tf.constant(share))
        np.testing.assert_allclose(actual, 6 * share**power)
    np.testing.assert_allclose(wholes.scaled(whole, power, tf.constant(0.0)), 6)
