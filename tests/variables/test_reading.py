# SPDX-License-Identifier: Apache-2.0
"""A ReplicatedVariable reads, and is used, as a plain tf.Variable is."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

VALUE = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)
SUM = tf.VariableAggregation.SUM
ON_READ = tf.VariableSynchronization.ON_READ

READS: dict[str, Callable[[tf.Variable], Any]] = {
    "add": lambda v: v + 1.0,
    "radd": lambda v: 1.0 + v,
    "sub": lambda v: v - v,
    "rsub": lambda v: 9.0 - v,
    "mul": lambda v: v * v,
    "truediv": lambda v: 1.0 / v,
    "floordiv": lambda v: v // 2.0,
    "mod": lambda v: v % 2.0,
    "pow": lambda v: 2.0**v,
    "neg": operator.neg,
    "abs": abs,
    "matmul": lambda v: v @ tf.transpose(v),
    "rmatmul": lambda v: tf.ones([1, 2]) @ v,
    "less": lambda v: v < 3.0,
    "equal": lambda v: v == VALUE,
    "index": lambda v: v[1],
    "slice": lambda v: v[:, 1:],
    "newaxis": lambda v: v[..., tf.newaxis],
    "mask": lambda v: v[v > 2.0],
    "gather": lambda v: tf.gather(v, [1, 0, 1]),
    "sparse_read": lambda v: v.sparse_read([1, 0]),
    "gather_nd": lambda v: v.gather_nd([[1, 2]]),
    "embedding": lambda v: tf.nn.embedding_lookup(v, [[1], [0]]),
    "value": lambda v: v.value(),
    "read_value": lambda v: v.read_value(),
    "convert": tf.convert_to_tensor,
    "identity": tf.identity,
    "cast": lambda v: tf.cast(v, tf.int32),
    "stack": lambda v: tf.stack([v, v]),
    "is_initialized": lambda v: v.is_initialized(),
    "cond": lambda v: tf.cond(tf.constant(True), lambda: v * 2.0, lambda: v * 3.0),
    "while": lambda v: tf.while_loop(
        lambda i, _: i < 3, lambda i, s: (i + 1, s + v), [0, tf.zeros([2, 3])]
    )[1],
    "map": lambda v: tf.map_fn(lambda x: x * v, tf.ones([2])),
    "function": lambda v: tf.function(lambda: v * 2.0)(),
    "argument": lambda v: tf.function(lambda x: x * 2.0)(v),
    "nested_argument": lambda v: tf.function(lambda x: x["a"][0] * 2.0)({"a": [v]}),
}


def make(repl: replicator.Replicator, value: Any = VALUE, **facts: Any) -> tf.Variable:
    with repl.context():
        return tf.Variable(value, **facts)


@pytest.mark.battery(5)
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("name", READS)
def test_reads_as_a_plain_variable(name: str, inside: bool) -> None:
    repl = helpers.make(2)
    variable = make(repl)
    expected = READS[name](tf.Variable(VALUE))

    def step_fn() -> Any:
        return READS[name](variable)

    for result in repl.run(step_fn) if inside else [step_fn()]:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("name", ["sparse_read", "gather_nd", "read_value", "cond"])
def test_each_replica_reads_its_own_component(name: str) -> None:
    repl = helpers.make(3)
    variable = make(repl, synchronization=ON_READ, aggregation=SUM)

    def step_fn() -> Any:
        variable.assign(VALUE * (repl.replica_id + 1))
        return READS[name](variable)

    results = repl.run(step_fn)
    for r in range(3):
        expected = READS[name](tf.Variable(VALUE * (r + 1)))
        np.testing.assert_array_equal(results[r], expected)
    np.testing.assert_array_equal(
        READS[name](variable), READS[name](tf.Variable(VALUE * 6))
    )


def test_python_sees_a_variable() -> None:
    variable = make(helpers.make(2), name="weights")
    assert isinstance(variable, tf.Variable)
    assert isinstance(variable, replicator.ReplicatedVariable)
    assert tf.is_tensor(variable) and not isinstance(variable, tf.Tensor)
    assert variable.shape == variable.get_shape() == [2, 3]
    assert variable.dtype == tf.float32
    assert variable.name == "weights:0"
    assert "CPU:0" in variable.device
    assert variable.initializer is None
    np.testing.assert_array_equal(variable.numpy(), VALUE)
    np.testing.assert_array_equal(np.asarray(variable), VALUE)
    assert [row.shape for row in variable] == [[3], [3]]
    assert variable.ref() in {variable.ref()} and variable.ref().deref() is variable
    assert tf.nest.flatten([variable], expand_composites=True)[0] is variable
    shown = "<tf.Variable 'weights:0' shape=(2, 3) dtype=float32, numpy="
    assert repr(variable).startswith(shown)
    with pytest.raises(TypeError, match="unhashable"):
        hash(variable)
    with pytest.raises(RuntimeError, match="not supported"):
        variable += 1.0


@pytest.mark.parametrize(
    ("facts", "trainable"),
    [
        ({}, True),
        ({"trainable": False}, False),
        ({"synchronization": ON_READ}, False),
        ({"aggregation": SUM}, True),
    ],
    ids=["default", "not_trainable", "on_read", "aggregated"],
)
def test_facts_are_those_of_a_plain_variable(
    facts: dict[str, Any], trainable: bool
) -> None:
    variable = make(helpers.make(2), constraint=tf.nn.relu, **facts)
    plain = tf.Variable(VALUE, constraint=tf.nn.relu, **facts)
    for name in ("trainable", "synchronization", "aggregation", "constraint"):
        assert getattr(variable, name) == getattr(plain, name)
    assert variable.trainable == trainable


@pytest.mark.parametrize("value", ["text", True, 7, 2.5, 1j])
def test_any_dtype(value: Any) -> None:
    repl = helpers.make(2)
    variable = make(repl, value)
    assert variable.dtype == tf.Variable(value).dtype
    for result in repl.run(lambda: variable):
        assert result.numpy() == tf.constant(value).numpy()


def test_unknown_shapes() -> None:
    repl = helpers.make(2)
    variable = make(repl, [1.0], shape=tf.TensorShape([None]))
    variable.assign([1.0, 2.0])
    assert variable.shape.as_list() == [None]

    def step_fn() -> tf.Tensor:
        variable.assign(tf.concat([variable, [3.0]], 0))
        return variable.read_value()

    for result in repl.run(step_fn):
        np.testing.assert_array_equal(result, [1.0, 2.0, 3.0])
    helpers.assert_replicas_equal([variable])


def test_a_function_is_traced_once_per_variable_and_replica() -> None:
    repl = helpers.make(2, build="trace")
    one, two = make(repl), make(repl, 2 * VALUE)
    traces = []

    @tf.function
    def twice(variable: tf.Variable) -> tf.Tensor:
        traces.append(variable)
        return variable * 2.0

    for _ in range(2):
        np.testing.assert_array_equal(twice(one), VALUE * 2)
        np.testing.assert_array_equal(twice(two), VALUE * 4)
    assert len(traces) == 2 and traces[0] is one and traces[1] is two
    repl.run(lambda: (twice(one), twice(one)))
    assert len(traces) == 4


def test_functions_that_reduce_retracing_keep_variables_apart() -> None:
    repl = helpers.make(2)
    twice = tf.function(lambda v, x: v * x, reduce_retracing=True)
    for value in (VALUE, 3 * VALUE):
        variable = make(repl, value)
        for size in (1, 2, 3):
            result = twice(variable[:1, :1], tf.ones([1, size]))
            assert result.shape == [1, size]
            result = twice(variable, tf.ones([size, 1, 1]))
            np.testing.assert_array_equal(result[0], value)


def test_functions_that_write_their_argument_write_all_components() -> None:
    repl = helpers.make(2)
    variable = make(repl, [1.0])
    add = tf.function(lambda v: v.assign_add([1.0]))
    np.testing.assert_array_equal(add(variable), [2.0])
    assert helpers.components(variable) == [[2.0], [2.0]]


def test_tapes_watch_it() -> None:
    repl = helpers.make(2)
    variable = make(repl)

    def step_fn() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable**2) * (repl.replica_id + 1.0)
        (watched,) = tape.watched_variables()
        assert watched is variable
        return tape.gradient(loss, variable)

    def through_function() -> tf.Tensor:
        return tf.function(step_fn)()

    for step in (step_fn, through_function):
        for r, gradient in enumerate(repl.run(step)):
            np.testing.assert_allclose(gradient, 2 * VALUE * (r + 1))
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(variable)
        loss = tf.reduce_sum(variable**2)
    np.testing.assert_allclose(tape.gradient(loss, variable), 2 * VALUE)


def test_gradients_of_lookups_are_sparse() -> None:
    repl = helpers.make(2)
    variable = make(repl)

    def step_fn() -> tf.IndexedSlices:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(variable, [1, 1]))
        return tape.gradient(loss, variable)

    for gradient in repl.run(step_fn):
        assert isinstance(gradient, tf.IndexedSlices)
        np.testing.assert_array_equal(gradient.indices, [1, 1])


@pytest.mark.parametrize("make_gradient", [tf.gradients, tf.compat.v1.gradients])
def test_symbolic_gradients_reach_it(make_gradient: Callable[..., Any]) -> None:
    repl = helpers.make(2)
    variable = make(repl)

    def step_fn() -> tf.Tensor:
        loss = tf.reduce_sum(variable**2) * (repl.replica_id + 1.0)
        return make_gradient(loss, [variable])[0]

    for r, gradient in enumerate(repl.run(step_fn)):
        np.testing.assert_allclose(gradient, 2 * VALUE * (r + 1))


def another_devices() -> tuple[replicator.Replicator, replicator.Replicator]:
    return helpers.make(2), helpers.make(4)


@pytest.mark.parametrize("swap", [False, True])
def test_a_variable_of_another_replicator_is_refused(swap: bool) -> None:
    repl, other = another_devices()[:: -1 if swap else 1]
    variable = make(repl, name="weights")

    def step_fn() -> tf.Tensor:
        return variable * 2.0

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)weights:0 has its components on .*CPU:1.*but the step runs on "
        r".*test_reading.py:\d+ in step_fn.*Fix: create it under the context\(\)",
    ):
        other.run(step_fn)
    np.testing.assert_array_equal(repl.run(step_fn)[1], VALUE * 2)


def test_several_replicators_work_side_by_side() -> None:
    sums = []
    for num_replicas in (2, 4):
        repl = helpers.make(num_replicas)
        variable = make(repl)
        sums.append((repl, variable))
    for repl, variable in sums:

        def step_fn(repl: Any = repl, variable: Any = variable) -> None:
            variable.assign_add(variable * float(repl.replica_id))

        repl.run(step_fn)
    for repl, variable in sums:
        factor = 1 + np.mean(range(repl.num_replicas))
        np.testing.assert_allclose(variable, VALUE * factor)
        helpers.assert_replicas_equal([variable])


@pytest.mark.mirrored
def test_functions_that_cannot_be_traced_per_replica_are_refused() -> None:
    repl = helpers.make(2, build="trace")
    variable = make(repl, name="weights")
    function = tf.function(lambda: variable * 2.0).get_concrete_function()

    # AutoGraph takes functions of equal code at equal lines of two files for one, and
    # tests/graph/passes/test_random.py has another that only returns function().
    def step_fn() -> tf.Tensor:
        return 1.0 * function()

    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)replica 1 uses another replica's component of variable weights:0"
        r".*test_reading.py:\d+ in step_fn.*Fix: call the tf.function itself",
    ):
        repl.run(step_fn)
