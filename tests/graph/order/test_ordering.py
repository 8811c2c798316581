# SPDX-License-Identifier: Apache-2.0
"""Effects happen in each replica's program order, also around merged ops."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

import replicator
from replicator.graph.order import ordering
from tests import helpers, sampling


def _loop(repl: replicator.Replicator, variable: Any) -> None:
    """Adds 1 per replica, twice."""

    def turn(n: tf.Tensor) -> tuple[tf.Tensor]:
        variable.assign_add(repl.all_reduce(tf.ones([])))
        return (n + 1,)

    tf.while_loop(lambda n: n < 2, turn, [tf.constant(0)])


def test_what_follows_a_step_waits_for_reads_and_writes_of_merged_ops() -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(1.0)

    def step() -> tf.Tensor:
        _loop(repl, variable)
        positive = variable > 0.0
        return tf.cond(positive, lambda: repl.all_reduce(variable * 1.0), lambda: 0.0)

    @tf.function
    def outer() -> Any:
        values = tf.TensorArray(tf.float32, 3)
        for k in tf.range(3):
            values = values.write(k, repl.run(step)[0])
            variable.assign(variable * 2.0)
        return values.stack()

    # 1 + 4 = 5, twice 5; 10 + 4, 28 + 4
    for _ in range(5):
        variable.assign(1.0)
        assert outer().numpy().tolist() == [10.0, 28.0, 64.0]
        assert helpers.components(variable) == [64.0, 64.0]


def test_a_step_waits_for_what_stands_before_it() -> None:
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(1.0)

    def step() -> tf.Tensor:
        _loop(repl, variable)
        return variable.read_value()

    @tf.function
    def outer() -> Any:
        variable.assign(10.0)
        before = variable.read_value()
        first = repl.run(step)
        variable.assign(-variable)
        second = repl.run(step)
        variable.assign_add(100.0)
        return before, first[0], first[1], second[0], second[1]

    for _ in range(5):
        assert [float(x) for x in outer()] == [10.0, 14.0, 14.0, -10.0, -10.0]
        assert helpers.components(variable) == [90.0, 90.0]


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_build_that_started_over_leaves_no_effects(mode: str) -> None:
    """The second attempt must not wait for, and so run, writes of the first."""
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable(1.0)
        table = tf.Variable(tf.ones([3, 1]))
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        optimizer.build([table])

    def step() -> tf.Tensor:
        _loop(repl, variable)
        with tf.GradientTape() as tape:
            sparse = repl.replica_id == 0  # which replica 1 has to know beforehand
            rows = tf.gather(table, [1]) if sparse else table * 1.0
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return variable.read_value()

    assert list(helpers.run(mode, repl, lambda: step)) == [5.0, 5.0]
    assert table.numpy().ravel().tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_effects_of_a_replica_keep_their_order_through_merged_ops(mode: str) -> None:
    repl = helpers.make(2)
    log: list[tuple[int, str, int]] = []

    def step() -> tf.Tensor:
        r = repl.replica_id

        def note(what: str, n: Any) -> None:
            def write(n: tf.Tensor) -> None:
                log.append((r, what, int(n)))

            tf.py_function(write, [n], [])

        @tf.function
        def function(n: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
            note("in", n)
            x = tf.cond(x > -1.0, lambda: repl.all_reduce(x), lambda: x)
            tf.debugging.assert_greater(x, 0.0)
            tf.print(x, output_stream="file:///dev/null")
            note("out", n)
            return x

        note("before", 0)
        x = tf.while_loop(
            lambda n, x: n < 2,
            lambda n, x: (n + 1, function(n, x)),
            [tf.constant(0), helpers.opaque(1.0)],
        )[1]
        note("after", 0)
        return x

    expected = [
        ("before", 0),
        ("in", 0),
        ("out", 0),
        ("in", 1),
        ("out", 1),
        ("after", 0),
    ]
    assert list(helpers.run(mode, repl, lambda: step, steps=3)) == [4.0, 4.0]
    for r in range(2):
        assert [entry[1:] for entry in log if entry[0] == r] == 3 * expected


@pytest.mark.parametrize(
    ("place", "mode"),
    sampling.in_turn(["function", "conditional", "loop"], helpers.MODES),
)
def test_effects_that_read_a_variable_happen_wherever_they_are(
    place: str, mode: str
) -> None:
    """Also where nothing uses a result, and nothing is written."""
    repl = helpers.make(2)
    log: list[tuple[int, float]] = []

    def make_step() -> Any:
        variable = tf.Variable(3.0)

        def step() -> tf.Tensor:
            r = repl.replica_id

            def note() -> tf.Tensor:
                tf.numpy_function(lambda x: log.append((r, float(x))), [variable], [])
                return tf.constant(1)

            if place == "function":
                tf.function(note)()
            elif place == "conditional":
                tf.cond(helpers.opaque(True), note, lambda: tf.constant(0))
            else:
                tf.while_loop(lambda n: n < 1, lambda n: (n + note(),), [0])
            return tf.constant(0.0)

        return step

    helpers.run(mode, repl, make_step, steps=2)
    assert sorted(log) == 2 * [(0, 3.0)] + 2 * [(1, 3.0)]


def test_a_write_waits_for_the_reads_before_it_and_reads_for_the_write() -> None:
    """Whatever the times that ops take, which a run shows only by chance."""
    with tf.Graph().as_default():
        handle = tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[])
        reads = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).op]
        write = tf.raw_ops.AssignVariableOp(resource=handle, value=2.0)
        reads.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32).op)
        ordering.order_in_session([[reads[0], write, reads[1]]], [], frozenset())
    assert write.control_inputs == [reads[0]]
    assert reads[1].control_inputs == [write]
