# SPDX-License-Identifier: Apache-2.0
"""Each variable is read once between two writes, and only its rows if these are used.

That steps see what they have written is a matter of tests/programs/writes.py.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

from replicator.graph.passes import reads
from tests import helpers

v1 = tf.compat.v1
_MEAN = tf.VariableAggregation.MEAN
Use = Callable[[tf.Variable], Any]


# --- Joined reads ---------------------------------------------------------------------


def _after(first: tf.Tensor, then: Callable[[], tf.Tensor]) -> tf.Tensor:
    with tf.control_dependencies([first]):
        return then()


# What two replicas do with a variable of their own: how many reads are joined in all,
# and how many are left on each.
_JOINED: dict[str, tuple[Use, int, int]] = {
    "without a write": (lambda v: [v * float(k) for k in range(5)], 8, 1),
    "around a write": (lambda v: [v + 1.0, v.assign_add(1.0), v + 1.0, v + 2.0], 2, 2),
    "after an assignment": (lambda v: [v.assign(tf.zeros([])), v + 1.0], 2, 0),
    "waiting for something": (lambda v: _after(v + 1.0, lambda: v + 2.0), 0, 2),
}


@pytest.mark.parametrize("name", _JOINED)
def test_reads_between_two_writes_are_one(name: str) -> None:
    use, joined, left = _JOINED[name]
    with tf.Graph().as_default() as graph:
        groups = []
        for _ in range(2):
            variable = tf.Variable(3.0)
            start = len(graph.get_operations())
            use(variable)
            groups.append(graph.get_operations()[start:])
        assert reads.join_reads(groups, set()) == joined, name
        for ops in groups:
            read = [op for op in ops if op.type == "ReadVariableOp"]
            assert sum(bool(op.outputs[0].consumers()) for op in read) == left, name


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_variables_made_in_a_sessions_step_are_not_read_as_initialised(
    num_replicas: int,
) -> None:
    """Their initialisers are among the step's ops, and assign too."""
    repl = helpers.make(num_replicas)

    def step() -> list[tf.Tensor]:
        variable = v1.get_variable("v", initializer=1.0, aggregation=_MEAN)
        before = variable + 0.0
        variable.assign_add(1.0)
        tf.compat.v1.add_to_collection("seen", tf.convert_to_tensor(variable))
        variable.assign_add(1.0)
        return [before, variable + 0.0]

    with tf.Graph().as_default() as graph:
        fetches = repl.run(step)
        with helpers.monitored_session() as session:
            for turn in range(3):
                # What a collection has is read where it stands in the program.
                found = session.run([*fetches, graph.get_collection("seen")])
                wanted = [2 * turn + n for n in (1.0, 3.0, 2.0)]
                assert [list(own) for own in found] == [
                    [want] * num_replicas for want in wanted
                ]


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
    rates = [own.handle for own in optimizer._learning_rate.value.components]
    inner = [i.name for outer, i in function.graph.captures if _is_in(outer, rates)]
    assert [used[name] for name in inner] == [1, 1]


def _is_in(tensor: tf.Tensor, tensors: Sequence[tf.Tensor]) -> bool:
    return any(tensor is one for one in tensors)


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


# --- Rows -----------------------------------------------------------------------------


def _lookup(table: Any, indices: Any) -> tf.Tensor:
    """Gathers from the whole variable, as Keras' layers do."""
    return tf.gather(tf.convert_to_tensor(table), indices)


def _ops_run(use: Callable[[tf.Tensor, tf.Variable], Any]) -> list[tf.Operation]:
    """Returns the ops that run for a use of a read of a table, on two replicas."""
    repl = helpers.make(2)

    def step() -> Any:
        variable = v1.get_variable("t", [4, 2], aggregation=_MEAN)
        return use(tf.convert_to_tensor(variable), variable)

    with tf.Graph().as_default():
        return helpers.ops_run(repl.run(step))


@pytest.mark.parametrize(
    ("use", "gathers"),
    [
        (lambda t, v: tf.gather(t, [1]), 2),
        (lambda t, v: _lookup(v, [1]) + _lookup(v, [2]), 4),
    ],
)
def test_only_rows_are_read_of_what_is_only_gathered_from(
    use: Any, gathers: int
) -> None:
    types = [op.type for op in _ops_run(use)]
    assert types.count("ResourceGather") == gathers
    assert "ReadVariableOp" not in types
    assert "GatherV2" not in types


_WHOLE: dict[str, Callable[[tf.Tensor, tf.Variable], Any]] = {
    "the whole is used": lambda t, v: tf.gather(t, [1]) + tf.reduce_sum(t),
    "the whole is returned": lambda t, v: (tf.gather(t, [1]), t),
    "along another axis": lambda t, v: tf.gather(t, [1], axis=1),
    "along an unknown axis": lambda t, v: tf.gather(t, [1], axis=helpers.opaque(0)),
    "in batches": lambda t, v: tf.gather(t, [[1]] * 4, batch_dims=1),
    "after a write": lambda t, v: _after(
        v.assign_add(tf.ones([4, 2])), lambda: tf.gather(t, [1])
    ),
    "waited for": lambda t, v: _after(t, lambda: tf.gather(t, [1]) + 1.0),
}


@pytest.mark.parametrize("name", _WHOLE)
@pytest.mark.mirrored
def test_anything_else_reads_the_whole(name: str) -> None:
    types = [op.type for op in _ops_run(_WHOLE[name])]
    assert types.count("GatherV2") + types.count("ResourceGather") >= 2, name
    assert types.count("ReadVariableOp") >= 2, name


@pytest.mark.parametrize("inside", [True, False])
def test_rows_wait_for_what_the_gather_waits_for(inside: bool) -> None:
    """An axis that is made where the gather is waits in its place, to TensorFlow."""
    gates: list[tf.Operation] = []

    def use(t: tf.Tensor, v: tf.Variable) -> tf.Tensor:
        gates.append(tf.no_op())
        row, axis = helpers.opaque([1]), 0 if inside else tf.constant(0)
        return _after(gates[-1], lambda: tf.gather(t, row, axis=axis))

    ops = _ops_run(use)
    assert len(gates) == 2
    assert set(gates) <= set(ops)


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


# --- Reads shared while a replica is built --------------------------------------------


def _around(write: Use) -> Use:
    return lambda v: [v + 1.0, write(v), v + 1.0]


def _twice(block: Callable[[], Any]) -> Use:
    def use(variable: tf.Variable) -> None:
        with block():
            variable + 1.0
            variable + 1.0

    return use


# What a replica does with a variable, and how many reads that adds at least, and most.
_READS: dict[str, tuple[Use, int, int]] = {
    "read alone": (lambda v: [v + 1.0, v * 2.0, tf.square(v)], 1, 1),
    "assigned": (_around(lambda v: v.assign([3.0, 4.0])), 1, 1),
    "added to": (_around(lambda v: v.assign_add([1.0, 1.0])), 2, 9),
    "assigned in a function": (
        _around(lambda v: tf.function(lambda: v.assign([3.0, 4.0]))()),
        *(2, 9),
    ),
    "assigned in a branch": (
        _around(
            lambda v: tf.cond(
                tf.constant(True), lambda: v.assign([3.0, 4.0]), lambda: v
            )
        ),
        *(2, 9),
    ),
    "recorded": (_twice(tf.GradientTape), 2, 2),
    "waiting": (_twice(lambda: tf.control_dependencies([tf.no_op()])), 2, 2),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", _READS)
def test_a_variable_is_read_again_where_it_may_have_changed(name: str) -> None:
    use, least, most = _READS[name]
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
    assert least <= added[-1] <= most, name


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


@pytest.mark.parametrize(
    "joined",
    [
        lambda reads: tf.concat(reads, 0),
        lambda reads: tf.concat([tf.identity(read) for read in reads], 0),
    ],
)
def test_those_that_share_memory_join_once(joined: Join) -> None:
    assert _joined_as_the_first(joined, [[0, 1, 2]]) == [True, True, True]
    assert _joined_as_the_first(joined, [[0, 2]]) == [True, False, True]
    assert _joined_as_the_first(joined, []) == [True, False, False]


@pytest.mark.parametrize(
    "joined",
    [
        lambda reads: tf.concat(reads[::-1], 0),
        lambda reads: tf.concat([reads[0], -reads[1]], 0),
        lambda reads: tf.concat([*reads, reads[0]], 0),
        lambda reads: tf.concat(reads, helpers.opaque(0)),
        lambda reads: _after(tf.no_op(), lambda: tf.concat(reads, 0)),
    ],
)
def test_what_is_joined_otherwise_stays(joined: Join) -> None:
    assert _joined_as_the_first(joined, [[0, 1, 2]]) == [True, True, False]
