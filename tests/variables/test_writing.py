# SPDX-License-Identifier: Apache-2.0
"""No assignment leaves replicas different, and each has its documented meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers
from tests.variables import parted as parts
from tests.variables.writes import ALL, PARTS, START, WRITES, make, own, written

AGGREGATION = tf.VariableAggregation
ON_READ = tf.VariableSynchronization.ON_READ

# --- Outside a step -------------------------------------------------------------------


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", ALL)
def test_outside_a_step_every_component_is_written(name: str, graph: bool) -> None:
    variable = make(helpers.make(3))
    value = START * 3.0

    def write() -> Any:
        return ALL[name](variable, value)

    result = tf.function(write)() if graph else write()
    expected = written(ALL[name], START, value)
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(helpers.components(variable), [expected] * 3)


def test_what_an_assignment_returns_is_the_variable_after_it() -> None:
    variable = make(helpers.make(2), 0.0)

    @tf.function
    def around() -> Any:
        with tf.control_dependencies([variable.assign(1.0)]):
            first = variable.read_value()
        second = variable.assign_add(2.0).read_value()
        third = variable.assign(5.0).assign_add(1.0).assign_sub(0.5).read_value()
        return first, second, third

    assert [t.numpy() for t in around()] == [1.0, 3.0, 5.5]
    assert helpers.components(variable) == [5.5, 5.5]
    assert variable.assign(2.0) is variable
    assert variable.assign_add(2.0, read_value=False) is None


def test_load_sets_every_component() -> None:
    repl = helpers.make(2)
    with tf.Graph().as_default():
        variable = make(repl)
        counter = make(repl, synchronization=ON_READ)
        parts = list(variable.components)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            variable.load(START * 2, session)
            np.testing.assert_array_equal(session.run(parts), [START * 2] * 2)
            with pytest.raises(
                replicator.ReplicatorError, match="(?s)differ.*Fix: run its assign"
            ):
                counter.load(START, session)


# --- Inside a step: mirrored variables ------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("name", WRITES)
def test_floats_are_averaged(mode: str, num_replicas: int, name: str) -> None:
    repl = helpers.make(num_replicas)

    def make_step() -> Callable[[], Any]:
        variable = make(repl)
        return lambda: WRITES[name](variable, own(repl))

    results = helpers.run(mode, repl, make_step)
    mean = np.mean([START * (r + 2) for r in range(num_replicas)], axis=0)
    expected = written(WRITES[name], START, mean)
    for result in results:
        np.testing.assert_allclose(result, expected)
        assert result.tobytes() == results[0].tobytes()


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(
    ("aggregation", "dtype"),
    [
        ("SUM", "float32"),
        ("SUM", "int32"),
        ("MEAN", "float32"),
        ("ONLY_FIRST_REPLICA", "float32"),
        ("ONLY_FIRST_REPLICA", "int32"),
    ],
)
def test_the_aggregation_says_what_is_assigned(
    name: str, aggregation: str, dtype: str
) -> None:
    repl = helpers.make(3)
    start = START.astype(dtype)
    variable = make(repl, start, aggregation=getattr(AGGREGATION, aggregation))

    def step_fn() -> Any:
        return WRITES[name](variable, start * (repl.replica_id + 2))

    repl.run(step_fn)
    factor = {"SUM": 9, "MEAN": 3, "ONLY_FIRST_REPLICA": 2}[aggregation]
    expected = written(WRITES[name], start, start * factor)
    np.testing.assert_array_equal(helpers.components(variable), [expected] * 3)


def test_an_integer_mean_is_refused() -> None:
    repl = helpers.make(2)
    variable = make(repl, 1, aggregation=AGGREGATION.MEAN)

    def step_fn() -> None:
        variable.assign(2)

    with pytest.raises(
        replicator.ReplicatorError,
        match=r"(?s)mean of int32.*test_writing.py:\d+ in step_fn.*cast to a float",
    ):
        repl.run(step_fn)


@pytest.mark.parametrize("value", [3, True, "text"])
def test_integers_bools_and_strings_are_taken_as_equal(value: Any) -> None:
    for check in (False, True):
        repl = helpers.make(2, check=check)
        variable = make(repl, type(value)())
        repl.run(lambda variable=variable: variable.assign(value))
        assert [c == tf.constant(value).numpy() for c in helpers.components(variable)]


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        *[(dtype, {}) for dtype in ("int64", "bool", "string", "qint8", "quint8")],
        ("qint32", {}),
        ("int64", {"check": True}),
    ],
)
def test_unequal_values_without_a_mean_are_found(
    mode: str, dtype: str, options: dict[str, Any]
) -> None:
    repl = helpers.make(2, **options)

    def make_step() -> Callable[[], Any]:
        def given(*numbers: int) -> tf.Tensor:
            text = [str(number) for number in numbers]
            return tf.constant(text) if dtype == "string" else tf.cast(numbers, dtype)

        variable = make(repl, given(0, 0))

        def step_fn() -> tf.Tensor:
            variable.assign(given(1, repl.replica_id))
            return variable.read_value()

        return step_fn

    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"(?s)different values to variable weights:0\..*at .*test_writing.py:\d+ "
        r"in step_fn.*Fix: give it an aggregation, or all_reduce the value",
    ):
        helpers.run(mode, repl, make_step)


def _counted_if(count: Any, x: tf.Tensor) -> None:
    tf.cond(x > 1.5, lambda: count.assign_add(1).read_value(), count.read_value)


def _counted_in_turns(count: Any, x: tf.Tensor) -> None:
    def turn(k: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([count.assign_add(1)]):
            return k + 1.0

    tf.while_loop(lambda k: k < x, turn, [tf.constant(0.0)])


@pytest.mark.parametrize("counted", [_counted_if, _counted_in_turns])
def test_integers_counted_by_some_replicas_only_are_found(counted: Any) -> None:
    repl = helpers.make(2)
    count = make(repl, 0)
    of_one = lambda ctx: tf.constant([1.0, 2.0])[ctx.replica_id]  # noqa: E731
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"(?s)replicas disagree in a .*weights:0.assign_add.*test_writing.py:\d+",
    ):
        repl.run(lambda x: counted(count, x), of_one)
    helpers.assert_replicas_equal([count])
    repl.run(lambda x: counted(count, x), lambda ctx: tf.constant(2.0))
    helpers.assert_replicas_equal([count])


def test_integers_that_are_equal_by_construction_are_not_communicated() -> None:
    repl = helpers.make(2)
    count, flag = make(repl, 0), make(repl, False)

    def step_fn(x: tf.Tensor) -> None:
        count.assign_add(tf.size(x))
        flag.assign(repl.all_reduce(tf.reduce_sum(x)) > 1.0)

    built = repl.build(step_fn, lambda ctx: tf.ones([3]))
    assert [row.primitive for row in built.plan.rows] == ["all_reduce"]
    built()
    assert (count.numpy(), flag.numpy()) == (3, True)


def test_a_failed_check_changes_no_variable() -> None:
    repl = helpers.make(2)
    variable = make(repl, 5)

    def step_fn() -> None:
        variable.assign(repl.replica_id)

    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(step_fn)
    assert helpers.components(variable) == [5, 5]


@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_written_leave_replicas_equal(name: str, variables: str) -> None:
    repl = helpers.make(3, variables=variables)
    variable = make(repl)
    results = repl.run(lambda: PARTS[name](variable, own(repl)))
    expected = np.mean(
        [written(PARTS[name], START, START * (r + 2)) for r in range(3)], axis=0
    )
    helpers.assert_replicas_equal([variable])
    np.testing.assert_allclose(variable, expected, rtol=1e-6)
    np.testing.assert_allclose(results, [expected] * 3, rtol=1e-6)


_ADDED = [name for name in PARTS if name.endswith(("_add", "_sub"))]


@pytest.mark.parametrize("parted", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("name", _ADDED)
def test_what_is_added_to_parts_is_aggregated(name: str, parted: bool) -> None:
    for aggregation, factor in (("SUM", 9), ("MEAN", 3), ("ONLY_FIRST_REPLICA", 2)):
        repl = parts.replicas(3) if parted else helpers.make(3)
        variable = make(repl, aggregation=getattr(AGGREGATION, aggregation))
        results = repl.run(lambda: PARTS[name](variable, own(repl)))  # noqa: B023
        expected = written(PARTS[name], START, START * factor)
        np.testing.assert_allclose(variable, expected, rtol=1e-6)
        np.testing.assert_allclose(results, [expected] * 3, rtol=1e-6)


@pytest.mark.parametrize("parted", [False, True], ids=["whole", "parts"])
@pytest.mark.parametrize("name", [name for name in PARTS if name not in _ADDED])
def test_only_what_is_added_to_parts_is_summed(name: str, parted: bool) -> None:
    repl = parts.replicas(2) if parted else helpers.make(2)
    variable = make(repl, aggregation=AGGREGATION.SUM)

    def step_fn() -> None:
        PARTS[name](variable, own(repl))

    with pytest.raises(
        replicator.ArgumentError,
        match=r"(?s)weights.*, whose aggregation is SUM, on replica 0.*"
        r"writes.py:\d+ in .*Fix: assign the whole value; or use scatter_add",
    ):
        repl.run(step_fn)


@pytest.mark.parametrize("parted", [False, True], ids=["whole", "parts"])
def test_one_number_for_all_rows(parted: bool) -> None:
    repl = parts.replicas(2) if parted else helpers.make(2)
    with repl.context():
        v = tf.Variable(tf.ones([4, 2]))
    repl.run(lambda: v.scatter_add(tf.IndexedSlices(repl.replica_id + 1.0, [0, 3])))
    np.testing.assert_array_equal(v, [[2.5] * 2, [1] * 2, [1] * 2, [2.5] * 2])


@pytest.mark.parametrize("mode", helpers.MODES)
def test_reads_and_writes_keep_their_order(mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        variable = make(repl, 1.0)

        def step_fn() -> Any:
            before = variable.read_value()
            written = variable.assign(before * 2.0 + repl.replica_id)  # mean: 2x + 0.5
            between = variable * 1.0
            last = written.assign_add(before).read_value()
            variable.assign_sub(1.0)
            return before, between, last, variable.read_value()

        return step_fn

    for steps, start in ((1, 1.0), (2, 2.5)):
        before, between, last, after = helpers.run(mode, repl, make_step, steps=steps)
        assert list(before) == [start] * 2
        assert list(between) == [2 * start + 0.5] * 2
        assert list(last) == [3 * start + 0.5] * 2
        assert list(after) == [3 * start - 0.5] * 2


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("where", ["cond", "while", "if", "function"])
def test_what_is_assigned_in_control_flow_is_averaged(where: str, mode: str) -> None:
    if mode == "session" and where == "if":
        where = "cond"  # without a function around there is no AutoGraph
    repl = helpers.make(2)
    variables = []

    def make_step() -> Callable[[], Any]:
        variable = make(repl, 1.0)
        variables.append(variable)

        def write() -> tf.Tensor:
            return variable.assign(2.0 + repl.replica_id).read_value()

        def step_fn() -> Any:
            chosen = helpers.opaque(2.0) > 1.0
            if where == "cond":
                return tf.cond(chosen, write, lambda: 0.0)
            if where == "while":
                return tf.while_loop(lambda x: x < 1.0, lambda x: write(), [0.0])[0]
            if where == "function":
                return tf.function(write)()
            result = 0.0
            if chosen:
                result = write()
            return result

        return step_fn

    assert list(helpers.run(mode, repl, make_step)) == [2.5, 2.5]
    if mode != "session":
        assert helpers.components(variables[0]) == [2.5, 2.5]


def test_integers_may_be_counted_inside_control_flow() -> None:
    repl = helpers.make(2)
    variable = make(repl, 0)

    def step_fn() -> Any:
        chosen = tf.reduce_sum(tf.ones([2])) > 1.0
        tf.cond(chosen, lambda: variable.assign_add(3).read_value(), lambda: 0)
        return tf.function(lambda: variable.assign_add(1).read_value())()

    assert [int(v) for v in repl.run(step_fn)] == [4, 4]
    assert helpers.components(variable) == [4, 4]


def test_the_graph_op_behind_the_methods_is_refused_by_line() -> None:
    repl = helpers.make(2)
    variable = make(repl, 1.0)

    def step_fn() -> None:
        value = tf.constant(1.0 + repl.replica_id)
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)replica 0 writes variable weights:0 by AssignVariableOp.*"
        r"test_writing.py:\d+ in step_fn.*Fix:.*own methods",
    ):
        repl.run(step_fn)


def test_wrong_shapes_raise_as_for_plain_variables() -> None:
    repl = helpers.make(2)
    variable = make(repl)
    with pytest.raises(ValueError, match=r"weights:0.*\(4,\).*\(1,\)"):
        variable.assign([1.0])
    with pytest.raises(ValueError, match=r"weights:0.*\(4,\).*\(1,\)"):
        repl.run(lambda: variable.assign([1.0]))
    np.testing.assert_array_equal(helpers.components(variable), [START] * 2)
