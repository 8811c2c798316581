# SPDX-License-Identifier: Apache-2.0
"""Variables of a program for one device are where a strategy has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import strategy
from tests.autodist import helpers
from tests.autodist.test_session import scope
from tests.autodist.trained import OPTIMIZERS

v1 = tf.compat.v1
HERE = r"test_variables\.py:\d+ in"
STRATEGIES = ("mirrored", strategy.PS(), strategy.PartitionedPS())


def _made(session: Any) -> dict[str, Any]:
    """Returns the library's variables, by the user's names."""
    return {op.name: v for op, v in session._steps._variables.made.items()}


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, False),
        ({"use_resource": True}, False),
        ({"use_resource": False}, True),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [v1.get_variable, v1.Variable])
def test_what_a_reference_variable_is_asked_for_by(make, arguments, expected):
    with scope() as autodist:
        names = {"name": "w", "dtype": tf.float32}
        value = {"initializer" if make is v1.get_variable else "initial_value": 1.0}
        w = make(**names, **value, **arguments)
        assert w.op.type == "VarHandleOp" and w.is_by_reference == expected
        assert autodist.create_distributed_session().run(w) == 1


def test_without_resource_variables_they_are_references_unless_asked_otherwise():
    enabled = v1.resource_variables_enabled()
    v1.disable_resource_variables()
    try:
        with scope():
            made = v1.get_variable("a", []), v1.get_variable("b", [], use_resource=True)
            assert [one.is_by_reference for one in made] == [True, False]
            assert not tf.Variable(1.0).is_by_reference  # of TensorFlow 2
    finally:
        if enabled:
            v1.enable_resource_variables()


@pytest.mark.parametrize("name", ["momentum", "adam", "adagrad"])
def test_slots_are_placed_with_their_variables(name):
    with scope(2, {"a": strategy.PS(), "b": strategy.AllReduce()}) as autodist:
        a, b = (v1.get_variable(one, [4, 2]) for one in "ab")
        read = tf.gather(a, [0, 3]), b * 2
        optimizer = OPTIMIZERS[name]()
        optimizer.minimize(tf.add_n(list(map(tf.nn.l2_loss, read))))
        made = _made(autodist.create_distributed_session())
        for slot in optimizer.get_slot_names():
            for v in (a, b):
                own = made[optimizer.get_slot(v, slot).op.name].placement
                assert own == made[v.op.name].placement
    assert made["a"].placement.owner == 0 and made["b"].placement.owner is None


def test_variables_and_their_slots_are_divided_alike():
    with scope(2, strategy.PartitionedPS()) as autodist:
        w = v1.get_variable("w", [4, 2])
        v1.train.AdamOptimizer(0.1).minimize(tf.nn.l2_loss(w))
        session = autodist.create_distributed_session()
        made = _made(session)
    for name in ("w", "w/Adam", "w/Adam_1"):
        parts = made[name].parts
        assert [part.shape.as_list() for part in parts] == [[2, 2], [2, 2]]
        assert [part.placement.owner for part in parts] == [0, 1]
    assert not hasattr(made["beta1_power"], "parts")
    node = session.strategy.node("w")
    assert (node.axis, node.sizes, node.shape) == (0, (2, 2), (4, 2))


def test_a_builder_is_told_of_what_is_trained_and_which_gradients_are_sparse():
    received = []

    class Told(strategy.AllReduce):
        def build(self, variables: Any, resources: Any) -> Any:
            received.extend(variables)
            return super().build(variables, resources)

    with scope(2, Told()) as autodist:
        table, both = (v1.get_variable(name, [10, 4]) for name in ("table", "both"))
        v1.get_variable("count", [], tf.int64)
        v1.get_variable("kept", [2], trainable=False)
        rows = tf.gather(table, [1, 2]) + tf.gather(both, [3, 4])
        loss = tf.nn.l2_loss(rows) + tf.nn.l2_loss(both)
        v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        autodist.create_distributed_session()
    facts = [
        (one.path, one.shape, one.sparse, one.order, one.nbytes) for one in received
    ]
    assert ("table", (10, 4), True, 0, 160) in facts
    assert [path for path, *_ in facts] == ["table", "both"]


def test_a_variable_from_outside_of_the_scope_is_refused():
    with tf.Graph().as_default(), v1.variable_scope("", use_resource=True):
        outside = v1.get_variable("outside", initializer=np.float32([1.0, 2.0]))
        with (autodist := helpers.make(2)).scope():
            inside = v1.get_variable("inside", initializer=3.0)
            total = tf.reduce_sum(outside) + inside
            session = autodist.create_distributed_session()
            with pytest.raises(
                replicator.UnsupportedError,
                match=rf"(?s)variable outside was created outs.*{HERE} test_a_var.*Fix",
            ):
                session.run(total)
            assert session.run(inside) == 3


def test_variables_of_imported_graphs_are_refused():
    with tf.Graph().as_default(), v1.variable_scope("", use_resource=True):
        w = v1.get_variable("w", [2])
        name = (w * 2.0).name
        exported = v1.train.export_meta_graph()
    with scope() as autodist:
        v1.train.import_meta_graph(exported)
        session = autodist.create_distributed_session()
        with pytest.raises(
            replicator.UnsupportedError, match=r"(?s)variable w .*or imported.*a Saver"
        ):
            session.run(name)


def test_values_are_those_of_the_users_initializers():
    def run(begin):
        v1.set_random_seed(3)
        made = [
            v1.get_variable("w", [3, 2], initializer=v1.glorot_uniform_initializer()),
            v1.get_variable("text", initializer=np.array(["a", "bc"])),
            v1.get_variable("flag", initializer=True),
            v1.get_variable("count", initializer=np.int64(5)),
            v1.get_variable("half", initializer=np.float16([0.5])),
            v1.get_variable("complex", initializer=np.complex64(1 + 2j)),
        ]
        session = begin()
        values = session.run(made)
        session.run([made[1].assign(["d", "e"]).op, made[2].assign(False).op])
        values += session.run([made[1], made[2]])
        session.run(v1.global_variables_initializer())
        return [*values, *session.run([made[1], made[2]])]

    helpers.in_sessions(run)


@pytest.mark.parametrize("plan", STRATEGIES, ids=["mirrored", "PS", "PartitionedPS"])
def test_updates_and_initializers_can_be_fetched_and_waited_for(plan):
    def run(begin):
        x = v1.placeholder(tf.float32, [None, 2], "x")
        w = tf.Variable([[1.0], [2.0]], name="w")
        optimizer = v1.train.MomentumOptimizer(0.5, 0.0)
        train = optimizer.minimize(tf.reduce_mean(tf.matmul(x, w)))
        init, asked = v1.global_variables_initializer(), w.is_initialized()
        with tf.control_dependencies([train]):
            after = tf.identity(w.read_value())
        session, values = begin(), []
        for _ in range(2):
            values.append(session.run(after, {x: np.ones([6, 2])}))
            session.run(train, {x: np.ones([7, 2])})
            values.append(session.run(w))
            session.run(init)
            values.append(session.run([w, asked, "w/Read/ReadVariableOp:0"]))
        return values

    helpers.in_sessions(run, 1, 3, strategy=plan)


def test_what_asks_for_a_value_before_there_is_one_fails_as_on_one_device():
    def run(begin):
        session = begin()
        late = tf.Variable(2.0)
        asked = late.is_initialized()
        with pytest.raises(tf.errors.FailedPreconditionError):
            session.run(late)
        before = session.run(asked)
        session.run(late.initializer)
        return [before, *session.run([asked, late])]

    assert helpers.in_sessions(run) == [False, True, 2]


def test_initial_values_may_be_fed():
    with scope(2) as autodist:
        given = v1.placeholder(tf.float32, [2])
        w = v1.Variable(given, name="w", use_resource=True)
        session = autodist.create_distributed_session()
        session.run(w.initializer, {given: [3.0, 4.0]})
        assert session.run(w * 2.0).tolist() == [6, 8]


def test_names_of_parts_are_none_of_the_users():
    with scope(2, strategy.PartitionedPS()) as autodist:
        w = v1.get_variable("w", initializer=np.float32([3, 4]), use_resource=True)
        other = tf.Variable(5.0, name="w/part_0")
        session = autodist.create_distributed_session()
        assert [one.tolist() for one in session.run([w, other])] == [[3, 4], 5]


def test_parts_of_a_variable_that_a_compiled_function_reads_are_joined():
    def run(begin):
        x = v1.placeholder(tf.float32, [None, 2])
        w = tf.Variable(tf.ones([2, 2]), name="w")

        @tf.function(jit_compile=True)
        def compiled(x):
            return tf.matmul(x, w)

        loss = tf.reduce_mean(compiled(x) ** 2)
        train = v1.train.GradientDescentOptimizer(0.1).minimize(loss)
        session = begin()
        feed = {x: [[1.0, 2.0], [3.0, 4.0], [5.0, 1.0]]}
        return [session.run([loss, train], feed)[0], session.run(w)]

    helpers.in_sessions(run, 2, strategy=strategy.PartitionedPS())


def test_a_strategy_and_an_option_that_differ_are_refused():
    with pytest.raises(
        replicator.ArgumentError, match=r"(?s)'mirrored'.*'sharded'.*Fix: pass only"
    ):
        helpers.make(2, "mirrored", variables="sharded")
    assert helpers.make(2, "mirrored", variables="mirrored").replicator.num_replicas


@pytest.mark.parametrize("plan", STRATEGIES, ids=str)
def test_initial_values_of_constants_and_random_numbers_need_no_step(plan):
    """A step for them took a third of a small session's time to be built."""

    def build() -> list[Any]:
        w = v1.get_variable("w", [6, 2], initializer=v1.glorot_uniform_initializer(3))
        q = v1.get_variable("q", [4, 4], initializer=v1.orthogonal_initializer(seed=5))
        one = v1.get_variable("one", initializer=tf.range(4.0) * 2)
        with tf.control_dependencies([one.initializer]):
            after = one.read_value() + 1
        return [w, q, one, v1.get_variable("two", initializer=after)]

    with tf.Graph().as_default():
        made = build()
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            expected = session.run(made)
    with scope(3, plan) as autodist:
        made = build()
        session = autodist.create_distributed_session()
        steps = session._steps
        (ran,) = [fetches for fetches, _, _ in steps._steps]
        assert [op for op, _ in ran] == [made[-1].initializer]
        for value, one in zip(session.run(made), expected, strict=True):
            np.testing.assert_array_equal(value, one)
        session.run(made[0].assign(made[0] * 0))
        session.run(v1.global_variables_initializer())  # as any other fetch
        np.testing.assert_array_equal(session.run(made[0]), expected[0])
