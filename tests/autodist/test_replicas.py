# SPDX-License-Identifier: Apache-2.0
"""The graph of all replicas has each replica's ops, and shared ops once."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

import replicator
from replicator import strategy
from replicator.autodist.replicas import PREFIX
from tests.autodist.test_session import scope

v1 = tf.compat.v1


def test_each_replica_has_its_ops_where_it_is_and_shared_ones_are_there_once() -> None:
    with scope(3) as autodist:
        x = v1.placeholder(tf.float32, [None], "x")
        rate = v1.placeholder(tf.float32, [2], "rate")
        w = tf.Variable([3.0, 4.0], name="w")
        product = tf.multiply(x[:, None] * w, rate, name="made")
        replicas = autodist.create_distributed_session()._replicas
    places = [place[product.op] for place in replicas.places]
    assert [op.name for op in places] == [
        *("made", f"{PREFIX}1/made", f"{PREFIX}2/made")
    ]
    for r, op in enumerate(places):
        assert tf.DeviceSpec.from_string(op.device).device_index == r
    for shared in (rate.op, w.initializer.inputs[1].op):
        assert len({place[shared] for place in replicas.places}) == 1
    assert len({place[x.op] for place in replicas.places}) == 3


def test_replicas_take_elements_in_their_order() -> None:
    with scope(3) as autodist:
        data = tf.data.Dataset.range(9)
        x = v1.data.make_one_shot_iterator(data).get_next()
        replicas = autodist.create_distributed_session()._replicas
    taken = [place[x.op] for place in replicas.places]
    for before, after in zip(taken, taken[1:], strict=False):
        assert before in after.control_inputs


def test_reductions_are_what_the_gradients_of_all_are_fetched_as() -> None:
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        w = tf.Variable(2.0, name="w")
        (gradient,) = tf.gradients(tf.reduce_mean(w * x), [w])
        session = autodist.create_distributed_session()
        assert session.run(gradient, {x: [1.0, 2.0, 6.0]}) == 3
        actual = [place[gradient.op] for place in session._replicas.places]
        assert all(op.type != "PlaceholderWithDefault" for op in actual)
        assert set(session._replicas.trained()) == {"w"}


def test_what_is_not_where_a_strategy_has_it_is_said_with_the_reason() -> None:
    with (
        mock.patch.object(logging, "warning") as warning,
        scope(2, strategy.PS()) as autodist,
    ):
        w = tf.Variable([1.0, 2.0], name="w")
        product = tf.function(lambda: w * 2, jit_compile=True)()
        session = autodist.create_distributed_session()
        assert session.run(product).tolist() == [2, 4]
    (call,) = warning.call_args_list
    message = str(call.args[0]) % call.args[1:]
    assert message.startswith("w is on all replicas, not where the strategy puts it")
    assert "jit_compile=True" in message


def test_what_is_built_behind_the_session_is_copied_too():
    with scope(2) as autodist:
        x = v1.placeholder(tf.float32, [None])
        w = tf.Variable(2.0)
        session = autodist.create_distributed_session()
        assert session.run(tf.reduce_mean(w * x), {x: [1, 2, 6]}) == 6
        assert session.run(w * x, {x: [1, 2, 6]}).tolist() == [2, 4, 12]
        slopes = tf.gradients(tf.reduce_mean(w * x * x), [x])
        np.testing.assert_allclose(
            *(session.run(slopes, {x: [1, 2, 6]})[0], [4 / 3, 8 / 3, 8]), rtol=1e-6
        )
        with pytest.raises(replicator.UnsupportedError, match=r"(?s)after create.*Fix"):
            session.run(tf.gradients(tf.reduce_mean(w * x), [w]), {x: [1, 2]})


def test_each_replica_is_dealt_its_own_elements():
    with scope(2) as autodist:
        data = tf.data.Dataset.range(8).batch(2)
        x = v1.data.make_one_shot_iterator(data).get_next()
        total = tf.reduce_sum(x)
        session = autodist.create_distributed_session()
        assert session.run(x).tolist() == [0, 1, 2, 3]
        assert session.run(total) == 4 + 5 + 6 + 7
        with pytest.raises(tf.errors.OutOfRangeError):
            session.run(x)
