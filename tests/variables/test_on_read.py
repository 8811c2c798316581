# SPDX-License-Identifier: Apache-2.0
"""ON_READ variables: each replica's own inside a step, one value outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers
from tests.variables.writes import ALL, START, make, own, written

v1 = tf.compat.v1
AGGREGATION = tf.VariableAggregation
ON_READ = tf.VariableSynchronization.ON_READ


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
def test_outside_a_step_an_on_read_variable_is_written_as_a_whole(
    name: str, aggregation: str
) -> None:
    repl = helpers.make(2)
    variable = make(
        repl,
        synchronization=ON_READ,
        aggregation=getattr(AGGREGATION, aggregation),
    )
    repl.run(lambda: variable.assign(own(repl)))
    before = variable.numpy()
    factor = 5.0 if aggregation == "SUM" else 2.5
    np.testing.assert_array_equal(before, START * factor)
    result = ALL[name](variable, START + 1.0)
    expected = written(ALL[name], before, START + 1.0)
    np.testing.assert_allclose(result, expected)
    np.testing.assert_allclose(variable, expected)


def _before(op: tf.Operation) -> set[tf.Operation]:
    """Returns all ops that run before an op."""
    found, stack = set(), [op]
    while stack:
        top = stack.pop()
        for other in (*(tensor.op for tensor in top.inputs), *top.control_inputs):
            if other not in found:
                found.add(other)
                stack.append(other)
    return found


_COMPUTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    "tensor": (
        lambda v: v.read_value() + 1.0,
        lambda v, value: v.assign(value, read_value=False),
    ),
    "list": (
        lambda v: tf.unstack(v.read_value()),
        lambda v, value: v.assign(value, read_value=False),
    ),
    "rows": (
        lambda v: v.sparse_read([0]),
        lambda v, value: v.scatter_add(tf.IndexedSlices(value, [0])),
    ),
    "slice": (lambda v: v[0:1] + 1.0, lambda v, value: v[0:1].assign(value)),
}


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("kind", _COMPUTED)
def test_no_component_is_written_before_the_written_value_is_read(
    kind: str, aggregation: str
) -> None:
    # In a session, nothing else orders what reads and what writes a variable.
    compute, write = _COMPUTED[kind]
    facts = {
        "synchronization": ON_READ,
        "aggregation": getattr(AGGREGATION, aggregation),
    }
    with tf.Graph().as_default() as graph:
        with helpers.make(3).context():
            variable = tf.Variable([1.0, 2.0], **facts)
        made = set(graph.get_operations())
        value = compute(variable)
        reads = set(graph.get_operations()) - made
        write(variable, value)
        written = set(graph.get_operations()) - made - reads
    assert len(reads) >= 3
    types = ("AssignVariableOp", "ResourceScatterAdd", "ResourceStridedSliceAssign")
    writes = [op for op in written if op.type in types]
    assert len(writes) >= 3
    value_ops = {tensor.op for tensor in tf.nest.flatten(value)}
    for op in writes:
        assert value_ops <= _before(op), op.name


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("float16", 60000.0),
        ("int8", 120),
        ("uint8", 200),
        ("int16", 32000),
        ("int32", 2**31 - 1),
        ("uint32", 2**32 - 1),
    ],
)
def test_means_of_small_dtypes_do_not_overflow(dtype: str, value: float) -> None:
    repl = helpers.make(2)
    start = tf.cast(value, dtype)
    variable = make(repl, start, synchronization=ON_READ, aggregation=AGGREGATION.MEAN)
    assert variable.read_value() == start


def test_sums_of_16_bit_floats_are_rounded_once() -> None:
    repl = helpers.make(3)
    facts = {"synchronization": ON_READ, "aggregation": AGGREGATION.SUM}
    variable = make(repl, tf.constant(0.0, tf.bfloat16), **facts)
    repl.run(lambda: variable.assign([256.0, 1.0, 1.0][repl.replica_id]))
    assert variable.read_value() == tf.constant(258.0, tf.bfloat16)


@pytest.mark.parametrize("aggregation", ["SUM", "MEAN"])
@pytest.mark.parametrize("how", ["eager", "function"])
def test_values_of_different_shapes_are_not_broadcast(
    how: str, aggregation: str
) -> None:
    repl = helpers.make(2)
    facts = {
        "synchronization": ON_READ,
        "aggregation": getattr(AGGREGATION, aggregation),
    }
    variable = make(repl, [0.0], shape=[None], **facts)
    repl.run(lambda: variable.assign(tf.ones([1 + 2 * repl.replica_id])))
    read = tf.function(variable.read_value) if how == "function" else variable.numpy
    with pytest.raises(tf.errors.InvalidArgumentError, match="same size and shape"):
        read()


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("SUM", 9.0), ("MEAN", 3.0), ("ONLY_FIRST_REPLICA", 2.0), ("NONE", 2.0)],
)
def test_on_read_variables_keep_their_own_values(
    mode: str, aggregation: str, expected: float
) -> None:
    repl = helpers.make(3)
    variables: list[tf.Variable] = []

    def make_step() -> Callable[[], Any]:
        variable = make(
            repl,
            np.zeros(4, np.float32),
            synchronization=ON_READ,
            aggregation=getattr(AGGREGATION, aggregation),
        )
        variables.append(variable)
        return lambda: variable.assign_add(own(repl)).read_value()

    if mode == "session":
        with tf.Graph().as_default():
            with repl.context():
                step_fn = make_step()
            fetches = repl.run(step_fn)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                results = session.run(fetches)
                aggregated = session.run(variables[0])
                np.testing.assert_array_equal(aggregated, variables[0].eval(session))
    else:
        results = helpers.run(mode, repl, make_step)
        aggregated = variables[0].numpy()
        np.testing.assert_array_equal(
            tf.function(lambda: variables[0] * 1.0)(), aggregated
        )
    np.testing.assert_array_equal(results, [START * (r + 2) for r in range(3)])
    np.testing.assert_array_equal(aggregated, START * expected)


@pytest.mark.battery(5)
@pytest.mark.parametrize("name", ALL)
def test_every_write_to_an_on_read_variable_stays_on_its_replica(name: str) -> None:
    repl = helpers.make(2)
    facts = {"synchronization": ON_READ, "aggregation": AGGREGATION.NONE}
    variable = make(repl, **facts)
    chosen = tf.function(lambda x: tf.cond(x[0] > 0, lambda: x, lambda: -x))

    def step_fn() -> Any:
        return ALL[name](variable, chosen(own(repl)))

    results = repl.run(step_fn)
    for r, component in enumerate(helpers.components(variable)):
        expected = written(ALL[name], START, START * (r + 2))
        np.testing.assert_array_equal(component, expected)
        np.testing.assert_array_equal(results[r], expected)


def test_what_an_on_read_sum_is_given_outside_is_the_sum() -> None:
    repl = helpers.make(3)
    variable = make(repl, synchronization=ON_READ, aggregation=AGGREGATION.SUM)
    np.testing.assert_array_equal(variable, START)
    repl.run(lambda: variable.assign(own(repl)))
    variable.assign(START)
    np.testing.assert_array_equal(variable, START)
    variable.assign_add(START)
    np.testing.assert_array_equal(variable, 2 * START)
    repl.run(lambda: variable.assign_add(START))
    np.testing.assert_array_equal(variable, 5 * START)


def test_integer_means_are_rounded_towards_zero_as_a_cast_does() -> None:
    repl = helpers.make(2)
    variable = make(repl, 0, synchronization=ON_READ, aggregation=AGGREGATION.MEAN)
    repl.run(lambda: variable.assign(3 + repl.replica_id))
    assert variable.numpy() == 3


class _CountsFirst(tf.keras.metrics.Metric):
    """A mean over calls of its own computation, which counts before it adds."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_weight(name="count", initializer="zeros")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(1.0)
        self.total.assign_add(tf.reduce_mean(values))

    def result(self) -> Any:
        return self.total / self.count


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_a_metric_does_not_count_a_shard_of_no_examples(nested: bool) -> None:
    repl = helpers.make(2)
    with repl.context():
        mean, own = tf.keras.metrics.Mean(), _CountsFirst()
        calls = tf.keras.metrics.Sum()

    def update(x: tf.Tensor) -> None:
        mean.update_state(tf.reduce_mean(x))
        own.update_state(x)
        calls.update_state(1.0)  # independent of the examples: counts everywhere

    def step(x: tf.Tensor) -> None:
        if nested:
            tf.cond(tf.size(x) < 9, lambda: update(x), lambda: None)
        else:
            update(x)

    data = tf.data.Dataset.from_tensor_slices([1.0, 2.0, 6.0]).batch(1)
    for _ in range(2):
        repl.run(step, data, remainder="pad")
    assert [float(metric.result()) for metric in (mean, own, calls)] == [3.0, 3.0, 4.0]


def test_a_metric_keeps_what_is_no_number_of_examples() -> None:
    repl = helpers.make(2)
    with repl.context():
        mean = tf.keras.metrics.Mean()
    x = tf.constant([1.0, np.inf])
    repl.run(
        lambda x: mean.update_state(tf.reduce_mean(x)), x, input_mode="global_batch"
    )
    assert np.isinf(mean.result())
