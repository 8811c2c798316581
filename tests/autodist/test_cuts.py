# SPDX-License-Identifier: Apache-2.0
"""A strategy's choices for variables are followed as far as a session can."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from absl import logging

from replicator import strategy
from replicator.autodist import cuts
from replicator.autodist.program import Program
from tests.autodist.parts import COLUMNS, ROWS
from tests.autodist.test_session import scope

v1 = tf.compat.v1


def _decided(autodist: Any) -> tuple[Program, cuts.Decided]:
    program = Program(v1.get_default_graph(), autodist._scope.variables)
    return program, cuts.decide(program, autodist.replicator._settings.chooser)


def test_parts_have_the_shape_of_the_whole_but_along_one_axis() -> None:
    assert [ROWS.shape_of(k) for k in (0, 1)] == [[1, 2], [3, 2]]
    assert [COLUMNS.shape_of(k) for k in (0, 1)] == [[4, 1], [4, 1]]


def test_variables_and_their_slots_are_divided_alike() -> None:
    with scope(2, strategy.PartitionedPS()) as autodist:
        w = v1.get_variable("w", [4, 2])
        v1.train.AdamOptimizer(0.1).minimize(tf.nn.l2_loss(w))
        _, decided = _decided(autodist)
    assert set(decided.cuts) == {"w", "w/Adam", "w/Adam_1"}
    cut = decided.cuts["w"]
    assert (cut.axis, cut.sizes, cut.shape) == (0, (2, 2), (4, 2))
    assert cut.names == ("w/part_0", "w/part_1")
    assert set(decided.chosen) == set(cut.names)
    assert decided.slots["w/Adam_1/part_1"] == "w/part_1"
    assert decided.slots.get("beta1_power") is None and "w/Adam" not in decided.slots


def test_without_a_strategy_all_is_whole() -> None:
    with scope(2) as autodist:
        w = v1.get_variable("w", [4, 2])
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(tf.nn.l2_loss(w))
        _, decided = _decided(autodist)
    assert not decided.cuts and not decided.chosen
    assert decided.slots == {"w/Momentum": "w"}


def test_a_builder_is_told_of_what_is_trained_and_which_gradients_are_sparse() -> None:
    received = []

    class Told(strategy.AllReduce):
        def build(self, variables: Any, resources: Any) -> Any:
            received.extend(variables)
            return super().build(variables, resources)

    with scope(2, Told()) as autodist:
        table = v1.get_variable("table", [10, 4])
        both = v1.get_variable("both", [10, 4])
        v1.get_variable("count", [], tf.int64)
        v1.get_variable("kept", [2], trainable=False)
        rows = tf.gather(table, [1, 2]) + tf.gather(both, [3, 4])
        tf.gradients(tf.nn.l2_loss(rows) + tf.nn.l2_loss(both), [table, both])
        _decided(autodist)
    facts = [
        (one.path, one.shape, one.sparse, one.order, one.nbytes) for one in received
    ]
    assert facts == [
        ("table", (10, 4), True, 0, 160),
        ("both", (10, 4), False, 1, 160),
    ]


def test_what_cannot_be_followed_is_said() -> None:
    by_proxies = strategy.PS(local_proxy_variable=True)
    smaller = strategy.AllReduce(compressor="int8")
    with (
        mock.patch.object(logging, "warning") as warning,
        scope(2, {"w": by_proxies, ".*": smaller}) as autodist,
    ):
        w = v1.get_variable("w", [2], use_resource=True)
        v1.get_variable("b", [2])
        tf.cond(v1.placeholder(tf.bool, []), lambda: w + 1, lambda: w * 2)
        _, decided = _decided(autodist)
    assert not decided.chosen["w"].placement.has_copies
    assert not decided.chosen["b"].synchronizer.compressor
    messages = sorted(
        str(call.args[0]) % call.args[1:] for call in warning.call_args_list
    )
    assert len(messages) == 2
    assert "for b is only partly followed: its gradient is sent as it" in messages[0]
    assert "for w is only partly followed: replicas have no copies" in messages[1]


def test_variables_in_parts_are_described_as_a_strategy_does() -> None:
    with scope(2, strategy.PartitionedPS()) as autodist:
        v1.get_variable("w", [4, 2])
        v1.get_variable("b", [])
        program, decided = _decided(autodist)
    variables = {name: name.upper() for name in ("b", *decided.cuts["w"].names)}
    actual = cuts.trained(program, decided, variables)
    assert actual["b"] == "B" and actual["w"].parts == ("W/PART_0", "W/PART_1")
    assert actual["w"].shape == [4, 2] and actual["w"].dtype.base_dtype == tf.float32


def test_names_of_parts_are_none_of_the_users():
    with scope(2, strategy.PartitionedPS()) as autodist:
        w = v1.get_variable("w", initializer=np.float32([3, 4]), use_resource=True)
        other = tf.Variable(5.0, name="w/part_0")
        session = autodist.create_distributed_session()
        assert [one.tolist() for one in session.run([w, other])] == [[3, 4], 5]


def test_what_takes_no_parts_is_whole_and_a_warning_says_so():
    with (
        mock.patch.object(logging, "warning") as warning,
        scope(2, strategy.PartitionedPS()) as autodist,
    ):
        x = v1.placeholder(tf.float32, [None, 2])
        w = tf.Variable(tf.ones([2, 2]), name="w")

        @tf.function(jit_compile=True)
        def compiled(x):
            return tf.matmul(x, w)

        loss = tf.reduce_mean(compiled(x) ** 2)
        session = autodist.create_distributed_session()
        assert session.run(loss, {x: [[1.0, 2.0]]}) == 9.0
        assert session.strategy.node("w").partitioner == ""
    messages = [str(call.args[0]) % call.args[1:] for call in warning.call_args_list]
    assert any(
        "w is kept whole" in line and "test_cuts.py" in line for line in messages
    )


def test_a_variable_that_a_dataset_uses_is_whole():
    with scope(2, strategy.PartitionedPS()) as autodist:
        w = v1.get_variable("w", initializer=np.float32([3, 4]), use_resource=True)
        data = tf.data.Dataset.range(4).map(lambda k: w[k % 2]).batch(2)
        iterator = v1.data.make_initializable_iterator(data)
        x = iterator.get_next()
        session = autodist.create_distributed_session()
        session.run(iterator.initializer)
        assert session.run(x).tolist() == [3, 4, 3, 4]
        assert session.strategy.node("w").partitioner == ""
