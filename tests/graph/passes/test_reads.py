# SPDX-License-Identifier: Apache-2.0
"""Each variable is read once between two writes, and steps see their earlier writes."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.graph.passes import reads
from tests import helpers

v1 = tf.compat.v1
_MEAN = tf.VariableAggregation.MEAN


def _used_reads(ops: list[tf.Operation]) -> int:
    return sum(
        op.type == "ReadVariableOp" and bool(op.outputs[0].consumers()) for op in ops
    )


def test_reads_without_a_write_between_are_one() -> None:
    with tf.Graph().as_default() as graph:
        variable = tf.Variable(3.0)
        start = len(graph.get_operations())
        results = [variable * float(k) for k in range(5)]
        ops = graph.get_operations()[start:]
        assert reads.join_reads([ops], set()) == 4
        assert _used_reads(ops) == 1
        with v1.Session() as session:
            session.run(variable.initializer)
            assert session.run(results) == [0.0, 3.0, 6.0, 9.0, 12.0]


def test_replicas_and_variables_are_apart() -> None:
    with tf.Graph().as_default() as graph:
        groups = []
        for _ in range(2):
            one, two = tf.Variable(1.0), tf.Variable(2.0)
            start = len(graph.get_operations())
            _ = one + two + one + two
            groups.append(graph.get_operations()[start:])
        assert reads.join_reads(groups, set()) == 4
        assert [_used_reads(ops) for ops in groups] == [2, 2]


def test_a_read_that_waits_for_something_stays() -> None:
    with tf.Graph().as_default() as graph:
        variable = tf.Variable(3.0)
        start = len(graph.get_operations())
        first = variable + 1.0
        with tf.control_dependencies([first]):
            second = variable + 2.0
        ops = graph.get_operations()[start:]
        assert reads.join_reads([ops], set()) == 0
        assert second.op.inputs[0] is not first.op.inputs[0]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_variables_made_in_a_sessions_step_are_not_read_as_initialised(
    num_replicas: int,
) -> None:
    """Their initialisers are among the step's ops, and assign too."""
    repl = helpers.make(num_replicas)

    def step() -> list[tf.Tensor]:
        variable = v1.get_variable("v", initializer=1.0)
        before = variable + 0.0
        variable.assign_add(1.0)
        return [before, variable + 0.0]

    with tf.Graph().as_default():
        fetches = repl.run(step)
        with v1.train.MonitoredSession() as session:
            values = [session.run(fetches) for _ in range(3)]
    for turn, (before, after) in enumerate(values):
        assert list(before) == [turn + 1.0] * num_replicas
        assert list(after) == [turn + 2.0] * num_replicas


def _write(how: str, variable: tf.Variable) -> None:
    if how == "assign":
        variable.assign(variable * 2.0)
    elif how == "add":
        variable.assign_add(variable)
    elif how == "cond":

        def double() -> tf.Tensor:
            tf.raw_ops.AssignVariableOp(resource=variable.handle, value=variable * 2.0)
            return tf.constant(0)

        tf.cond(helpers.opaque(True), double, lambda: tf.constant(1))
    else:
        tf.function(lambda: variable.assign(variable * 2.0))()


@pytest.mark.battery(5)
@pytest.mark.parametrize("how", ["assign", "add", "cond", "function"])
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_step_reads_what_it_wrote(mode: str, num_replicas: int, how: str) -> None:
    """Reads before, between and after writes see the values of program order."""
    repl = helpers.make(num_replicas)

    def make_step() -> Any:
        # ON_READ: written on its replica alone, even where communication is not
        # allowed.
        variable = tf.Variable(
            1.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

        def step() -> list[tf.Tensor]:
            seen = [variable + 0.0, variable * 1.0]
            for _ in range(2):
                _write(how, variable)
                seen += [variable + 0.0, variable * 1.0]
            return seen

        return step

    seen = helpers.run(mode, repl, make_step, steps=2)
    for values in seen:
        assert {float(v) for v in values} == {float(values[0])}
    assert [float(v[0]) for v in seen] == [4.0, 4.0, 8.0, 8.0, 16.0, 16.0]


def test_a_training_step_reads_each_component_once_before_its_update() -> None:
    repl = helpers.make(2)
    with repl.context():
        model = tf.keras.Sequential(
            [tf.keras.layers.Input((4,)), tf.keras.layers.Dense(4)]
        )
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.Adam())
        optimizer.build(model.trainable_variables)

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.ones([2, 4])) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    function = tf.function(lambda: repl.run(step)).get_concrete_function()
    used = collections.Counter(
        op.inputs[0].name
        for op in function.graph.get_operations()
        if op.type == "ReadVariableOp" and op.outputs[0].consumers()
    )
    learning_rates = [
        component.handle for component in optimizer._learning_rate.value.components
    ]
    inner = [
        i.name
        for outer, i in function.graph.captures
        if any(outer is handle for handle in learning_rates)
    ]
    assert len(inner) == 2
    assert [used[name] for name in inner] == [1, 1]


@pytest.mark.parametrize(("variables", "count"), [("mirrored", 3), ("sharded", 1)])
@pytest.mark.parametrize("mode", ["function", "session"])
def test_what_nothing_reads_is_not_read_before_a_write(
    mode: str, variables: str, count: int
) -> None:
    """Writes wait for reads, and would make them run."""
    repl = helpers.make(3, variables=variables)

    def run() -> Any:
        with repl.context():
            variable = tf.Variable([1.0, 2.0])

        def step() -> tf.Tensor:
            before = variable * 3.0 + variable
            tf.convert_to_tensor(variable)  # which nothing uses
            variable.assign_add(repl.all_reduce(before))
            return before

        def build() -> Any:
            return repl.run(step)

        if mode == "session":
            return build()
        graph = tf.function(build).get_concrete_function().graph
        return [*graph.outputs, *graph.control_outputs]

    with tf.Graph().as_default() if mode == "session" else contextlib.nullcontext():
        types = [op.type for op in helpers.ops_run(run())]
    assert types.count("ReadVariableOp") == count


def test_what_a_collection_has_is_read_where_it_stands_in_the_program() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        variable = v1.get_variable("v", initializer=1.0, aggregation=_MEAN)
        tf.compat.v1.add_to_collection("seen", tf.convert_to_tensor(variable))
        return variable.assign_add(1.0)

    with tf.Graph().as_default() as graph:
        fetches = repl.run(step)
        with helpers.monitored_session() as session:
            for turn in range(3):
                seen, _ = session.run([graph.get_collection("seen"), fetches])
                assert list(seen) == [1.0 + turn] * 2


# --- Rows -----------------------------------------------------------------------------


def _types_run(repl: Any, step: Any) -> list[str]:
    """Returns the types of the ops that run for a step's results, in a session."""
    with tf.Graph().as_default():
        return [op.type for op in helpers.ops_run(repl.run(step))]


def _lookup(table: Any, indices: Any) -> tf.Tensor:
    """Gathers from the whole variable, as Keras' layers do."""
    return tf.gather(tf.convert_to_tensor(table), indices)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_rows_are_read_where_they_stand_in_the_program(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        table = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))

        def step() -> Any:
            before = _lookup(table, [1])
            also = _lookup(table, [3])
            table.scatter_sub(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1])))
            after = _lookup(table, [1])
            table.assign(2.0 * table)
            return before, also, after, _lookup(table, [1])

        return step

    for steps in (1, 2):
        values = helpers.run(mode, repl, make_step, steps=steps)
        start = np.arange(8.0).reshape(4, 2)
        for _ in range(steps):
            expected = [start[1].copy(), start[3].copy()]
            start[1] -= 1
            expected += [start[1].copy()]
            start = 2 * start
            expected += [start[1].copy()]
        for received, value in zip(values, expected, strict=True):
            for own in received:
                np.testing.assert_array_equal(own, [value])


def test_steps_in_one_function_see_one_anothers_rows() -> None:
    repl = helpers.make(2)
    with repl.context():
        table = tf.Variable(tf.zeros([4, 2]))

    def step() -> tf.Tensor:
        rows = _lookup(table, [1])
        table.scatter_add(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1])))
        return rows

    @tf.function
    def several() -> Any:
        table.assign_add(tf.ones([4, 2]))
        one, two = repl.run(step), repl.run(step)
        table.assign_add(tf.ones([4, 2]))
        return one, two, table.read_value()

    for turn in range(3):
        one, two, end = several()
        assert [float(x[0, 0]) for x in (*one, *two)] == [
            *[4.0 * turn + 1] * 2,
            *[4.0 * turn + 2] * 2,
        ]
        assert float(end[1, 0]) == 4.0 * turn + 4


def test_only_rows_are_read_of_what_is_only_gathered_from() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        table = v1.get_variable("t", [4, 2])
        return _lookup(table, [1]) + _lookup(table, [2])

    types = _types_run(repl, step)
    assert types.count("ResourceGather") == 4
    assert "ReadVariableOp" not in types
    assert "GatherV2" not in types


@pytest.mark.parametrize(
    "use",
    {
        "the whole is used": lambda t, v: _lookup(t, [1]) + tf.reduce_sum(t),
        "the whole is returned": lambda t, v: (_lookup(t, [1]), t),
        "along another axis": lambda t, v: tf.gather(t, [1], axis=1),
        "along an unknown axis": lambda t, v: tf.gather(t, [1], axis=helpers.opaque(0)),
        "in batches": lambda t, v: tf.gather(t, [[1]] * 4, batch_dims=1),
        "after a write": lambda t, v: (v.assign_add(t), tf.gather(t, [1]))[1],
        "waited for": lambda t, v: _after(t, _lookup(t, [1])),
    }.items(),
    ids=lambda item: item[0],
)
@pytest.mark.mirrored
def test_anything_else_reads_the_whole(use: Any) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        variable = tf.compat.v1.get_variable("t", [4, 2])
        return use[1](variable.read_value().op.inputs[0], variable)

    types = _types_run(repl, step)
    assert types.count("GatherV2") + types.count("ResourceGather") >= 2
    assert types.count("ReadVariableOp") >= 2


def _after(first: tf.Tensor, then: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([first]):
        return tf.identity(then)


def test_a_gather_that_is_returned_is_gathered_once() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        return _lookup(v1.get_variable("t", [4, 2]), [1])

    assert _types_run(repl, step).count("ResourceGather") == 2


# --- Reads shared while a replica is built --------------------------------------------


def _reads_of(use: Callable[[tf.Variable], Any]) -> int:
    """Returns how many reads a variable's use adds on the last replica of a step."""
    repl = helpers.make(2)
    with repl.context():
        variable = tf.Variable([1.0, 2.0])
    added = []

    def step() -> None:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        use(variable)
        new = graph.get_operations()[before:]
        added.append(sum(op.type == "ReadVariableOp" for op in new))

    repl.run(step)
    return added[-1]


def _around(variable: tf.Variable, write: Callable[[], Any]) -> tf.Tensor:
    variable + 1.0
    write()
    return variable + 1.0


def _twice(block: Callable[[], Any]) -> Callable[[tf.Variable], Any]:
    def use(variable: tf.Variable) -> None:
        with block():
            variable + 1.0
            variable + 1.0

    return use


@pytest.mark.fast
def test_a_variable_is_read_once() -> None:
    assert _reads_of(lambda v: [v + 1.0, v * 2.0, tf.square(v)]) == 1


@pytest.mark.fast
def test_what_was_assigned_is_not_read() -> None:
    assert _reads_of(lambda v: _around(v, lambda: v.assign([3.0, 4.0]))) == 1


@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.assign_add([1.0, 1.0]),
        lambda v: tf.function(lambda: v.assign([3.0, 4.0]))(),
        lambda v: tf.cond(tf.constant(True), lambda: v.assign([3.0, 4.0]), lambda: v),
    ],
)
def test_what_was_changed_otherwise_is_read_again(write: Any) -> None:
    assert _reads_of(lambda v: _around(v, lambda: write(v))) >= 2


@pytest.mark.parametrize(
    "block", [tf.GradientTape, lambda: tf.control_dependencies([tf.no_op()])]
)
def test_what_is_recorded_or_waits_is_read_each_time(block: Any) -> None:
    assert _reads_of(_twice(block)) == 2


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_gradient_passes_through_a_read_after_one_outside_the_tape(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        variable = tf.Variable(3.0)

        def step() -> tuple[tf.Tensor, tf.Tensor]:
            before = variable * 1.0
            with tf.GradientTape() as tape:
                loss = tf.square(variable)
            return before, tape.gradient(loss, variable)

        return step

    before, gradient = helpers.run(mode, repl, make_step)
    assert [float(x) for x in before] == [3.0, 3.0]
    assert [float(x) for x in gradient] == [6.0, 6.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_values_follow_the_program_through_reads_and_writes(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Any:
        variable = tf.Variable(tf.ones([2]), shape=[None])

        def step() -> list[tf.Tensor]:
            seen = [variable.read_value()]
            variable.assign(variable * 3.0)
            seen.append(variable + 0.0)
            variable.assign_add([1.0, 1.0])
            seen.append(variable + 0.0)
            tf.function(lambda: variable.assign(variable * 2.0))()
            seen.append(variable + 0.0)
            variable.assign(tf.ones([3]))
            seen.append(variable + 0.0)
            return seen

        return step

    seen = helpers.run(mode, repl, make_step)
    want = [[1.0] * 2, [3.0] * 2, [4.0] * 2, [8.0] * 2, [1.0] * 3]
    for r in range(2):
        assert [np.asarray(values[r]).tolist() for values in seen] == want


@pytest.mark.parametrize("call", [tf.function, lambda f: lambda: _if(f)])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_what_one_replica_reads_in_a_function_does_not_move_others_reads(
    mode: str, call: Any
) -> None:
    """A function that only reads is no write, whichever replicas call it."""
    repl = helpers.make(3, variables="sharded")

    def make_step() -> Any:
        variable = tf.Variable(tf.ones([2]))

        def step() -> list[tf.Tensor]:
            own = tf.zeros([2])
            if repl.replica_id == 1:
                own = call(lambda: variable * 2.0)()
            seen = [own, variable + 0.0]
            variable.assign_add(repl.all_reduce(tf.ones([2])))
            return [*seen, variable + 0.0]

        return step

    own, before, after = helpers.run(mode, repl, make_step)
    assert [float(x[0]) for x in own] == [0.0, 2.0, 0.0]
    assert [float(x[0]) for x in before] == [1.0, 1.0, 1.0]
    assert [float(x[0]) for x in after] == [4.0, 4.0, 4.0]


def _if(true_fn: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.cond(helpers.opaque(True), true_fn, lambda: tf.zeros([2]))


# --- Joins of parts -------------------------------------------------------------------

Join = Callable[[Sequence[tf.Tensor]], tf.Tensor]


def _joined_as_the_first(joined: Join, near: Sequence[Sequence[int]]) -> list[bool]:
    """Makes three replicas join two parts; returns whose results became the first's."""
    with tf.Graph().as_default() as graph:
        parts = [tf.Variable([k, k]).value() for k in (1.0, 2.0)]
        groups, results = [], []
        for k in range(3):
            start = len(graph.get_operations())
            value = tf.concat(parts, 0) if k < 2 else joined(parts)
            results.append(tf.abs(value))
            groups.append(graph.get_operations()[start:])
        used = [result.op.inputs[0] for result in results]
        count = reads.share_joins(groups, near, set())
        same = [result.op.inputs[0] is used[0] for result in results]
        assert count == sum(same) - 1
        return same


def _identities(reads: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.identity(read) for read in reads], 0)


@pytest.mark.parametrize("joined", [lambda reads: tf.concat(reads, 0), _identities])
def test_those_that_share_memory_join_once(joined: Join) -> None:
    assert _joined_as_the_first(joined, [[0, 1, 2]]) == [True, True, True]
    assert _joined_as_the_first(joined, [[0, 2]]) == [True, False, True]
    assert _joined_as_the_first(joined, []) == [True, False, False]


def _waiting(reads: Sequence[tf.Tensor]) -> tf.Tensor:
    with tf.control_dependencies([tf.no_op()]):
        return tf.concat(reads, 0)


@pytest.mark.parametrize(
    "joined",
    [
        lambda reads: tf.concat(reads[::-1], 0),
        lambda reads: tf.concat([reads[0], -reads[1]], 0),
        lambda reads: tf.concat([*reads, reads[0]], 0),
        lambda reads: tf.concat(reads, helpers.opaque(0)),
        _waiting,
    ],
)
def test_what_is_joined_otherwise_stays(joined: Join) -> None:
    assert _joined_as_the_first(joined, [[0, 1, 2]]) == [True, True, False]
