# SPDX-License-Identifier: Apache-2.0
"""Partitioned variables behave like whole ones: reads, lookups, gradients, writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import replicator
from replicator import strategy
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.placement import Mirrored, Owned
from tests.variables import parted

ROWS, COLUMNS = 9, 4
INITIAL = np.random.RandomState(0).randn(ROWS, COLUMNS).astype(np.float32)
IDS = np.array([1, 8, 3, 3, 0, 2], np.int32)


def variable(repl: Any) -> tf.Variable:
    """Creates a variable of INITIAL."""
    with repl.context():
        return tf.Variable(INITIAL, name="table")


# --- Outside of steps -----------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1])
def test_reads_as_a_whole_outside_of_steps(axis: int) -> None:
    v = variable(parted.replicas(2, parted.InParts(2, axis)))
    assert isinstance(v, PartitionedVariable)
    assert isinstance(v, tf.Variable)
    assert v.shape == INITIAL.shape
    assert [part.shape[axis] for part in v.parts] == list(v.layout.sizes)
    np.testing.assert_array_equal(v.numpy(), INITIAL)
    np.testing.assert_array_equal(v.read_value(), INITIAL)
    np.testing.assert_array_equal(v + 0.0, INITIAL)
    np.testing.assert_array_equal(
        tf.gather(v, [[8, 0], [3, 3]]), INITIAL[[[8, 0], [3, 3]]]
    )
    np.testing.assert_array_equal(v.gather_nd([[8, 1]]), INITIAL[[8], [1]])
    np.testing.assert_array_equal(v[2:5, 1], INITIAL[2:5, 1])


def test_a_value_of_another_shape_is_refused_and_nothing_is_written() -> None:
    v = variable(parted.replicas(2))
    with pytest.raises(
        ValueError, match=r"table:0.*Shape mismatch.*\(9, 4\).*\(9, 3\)"
    ):
        v.assign(np.zeros([9, 3], np.float32))
    np.testing.assert_array_equal(v.numpy(), INITIAL)


def test_differentiates_outside_of_steps_as_a_whole_variable_does() -> None:
    v, whole = variable(parted.replicas(2)), tf.Variable(INITIAL)

    def gradient(of: tf.Variable) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(of**3) + tf.reduce_sum(tf.gather(of, IDS) ** 2)
        return tf.convert_to_tensor(tape.gradient(loss, of))

    np.testing.assert_allclose(gradient(v), gradient(whole), rtol=1e-5)
    np.testing.assert_allclose(
        tf.function(gradient)(v), tf.function(gradient)(whole), rtol=1e-5
    )


def test_lookups_are_vectorized_outside_of_steps() -> None:
    v = variable(parted.replicas(2))
    with tf.GradientTape() as tape:
        rows = tf.vectorized_map(lambda k: tf.gather(v, k) ** 2, tf.constant(IDS))
    gradient = tf.convert_to_tensor(tape.gradient(rows, v))
    np.testing.assert_allclose(rows, INITIAL[IDS] ** 2, rtol=1e-6)
    counts = np.bincount(IDS, minlength=ROWS)[:, np.newaxis]
    np.testing.assert_allclose(gradient, 2 * INITIAL * counts, rtol=1e-6)


def test_a_lookup_gives_rows_and_not_the_whole_to_tapes() -> None:
    v = variable(parted.replicas(2))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(v, IDS))
    gradient = tape.gradient(loss, v)
    assert isinstance(gradient, tf.IndexedSlices)
    np.testing.assert_array_equal(gradient.indices, IDS)


def test_rows_that_do_not_exist_are_refused() -> None:
    v = variable(parted.replicas(2))
    for row in (-1, ROWS):
        with pytest.raises(tf.errors.InvalidArgumentError):
            tf.gather(v, [row])


# --- Inside of steps ------------------------------------------------------------------


def lookup(v: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.gather(v, ids) ** 2)


def lookup_of_pairs(v: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.nn.embedding_lookup(v, tf.stack([ids, ids], 1)) ** 2)


def lookup_of_the_value(v: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.gather(tf.convert_to_tensor(v), ids) ** 2)


def slices(v: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.gather_nd(v, ids[:, tf.newaxis]) ** 2)


def dense(v: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.one_hot(ids, ROWS) @ v)


def conditional(v: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.cond(
        tf.reduce_sum(v) < 1e9,
        lambda: tf.reduce_sum(tf.gather(v, ids) ** 2),
        lambda: tf.reduce_sum(v**2) * tf.cast(tf.size(ids), tf.float32),
    )


def loop(v: Any, ids: tf.Tensor) -> tf.Tensor:
    def body(k: tf.Tensor, total: tf.Tensor) -> Any:
        rows = tf.one_hot(ids, ROWS) @ tf.tanh(v)
        return k + 1, total + tf.reduce_sum(rows) * tf.cast(k, tf.float32)

    return tf.while_loop(lambda k, _: k < 3, body, [0, 0.0])[1]


def lookups_in_a_loop(v: Any, ids: tf.Tensor) -> tf.Tensor:
    def body(k: tf.Tensor, total: tf.Tensor) -> Any:
        rows = tf.gather(v, ids) * tf.cast(k, tf.float32)
        return k + 1, total + tf.cond(
            k > 1, lambda: tf.reduce_sum(rows**2), lambda: tf.reduce_sum(rows)
        )

    return tf.while_loop(lambda k, _: k < 3, body, [0, 0.0])[1]


def in_a_function(v: Any, ids: tf.Tensor) -> tf.Tensor:
    @tf.function
    def inner(ids: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.gather(v, ids) ** 3) + lookup(v, ids)

    return inner(ids)


def vectorized(v: Any, ids: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(tf.vectorized_map(lambda k: lookup(v, k) * v[k, 0], ids))


LOSSES = (
    *(lookup, lookup_of_pairs, lookup_of_the_value, slices, dense, conditional),
    *(loop, lookups_in_a_loop, in_a_function, vectorized),
)


def trained(
    repl: Any, loss_of: Callable[..., Any], by: str = "tape", **ways: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a variable after two steps, and the last step's reads of it."""
    v = variable(repl)
    with repl.context():
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.01), op="sum")

    def input_fn(ctx: Any) -> tf.Tensor:
        return tf.constant(np.split(IDS, ctx.num_replicas)[ctx.replica_id])

    def step_fn(ids: tf.Tensor) -> tf.Tensor:
        if by == "tape":
            with tf.GradientTape() as tape:
                loss = loss_of(v, ids)
            gradient = tape.gradient(loss, v)
        else:
            (gradient,) = tf.gradients(loss_of(v, ids), v)
        optimizer.apply([gradient], [v])
        return v.read_value()

    for _ in range(2):
        read = repl.run(step_fn, input_fn)
    return v.numpy(), read


@pytest.mark.battery(4)
@pytest.mark.parametrize("count, axis", [(1, 0), (2, 0), (3, 1)])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_gradients_are_those_of_one_device(
    loss_of: Callable[..., Any], count: int, axis: int
) -> None:
    expected, _ = trained(parted.one_device(), loss_of)
    repl = parted.replicas(count, parted.InParts(count, axis))
    value, read = trained(repl, loss_of)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)
    for rows in read:  # after the update, on all replicas
        np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("loss_of", [lookup, dense])
def test_what_is_known_of_rows_is_not_compared_when_a_step_runs(
    loss_of: Callable[..., Any],
) -> None:
    """For any number of rows; and equal reads of replicas are joined once."""
    rules = {"table": replicator.strategy.Partitioned()}
    repl = replicator.Replicator(["CPU:0", "CPU:1"], strategy=rules)
    v = variable(repl)
    with repl.context():
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.01))
        optimizer.build([v])

    def step_fn(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(v, ids)
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def step(ids: tf.Tensor) -> None:
        repl.run(step_fn, lambda: ids)

    ops = step.get_concrete_function().graph.get_operations()
    compared = [op.name for op in ops if op.type == "Assert"]
    assert [name for name in compared if "guard" not in name] == [
        "written"
    ]  # the mark after all writes
    joins = [op for op in ops if op.type == "ConcatV2" and _joins_reads(op)]
    used = [op for op in joins if op.outputs[0].consumers()]
    assert len(used) == (1 if loss_of is dense else 0)


def _joins_reads(op: tf.Operation) -> bool:
    kinds = [tensor.op.inputs[0].op.type for tensor in op.inputs if tensor.op.inputs]
    return "ReadVariableOp" in kinds


@pytest.mark.parametrize("loss_of", [lookup, loop, lookups_in_a_loop])
def test_gradients_by_tf_gradients_are_those_of_one_device(
    loss_of: Callable[..., Any],
) -> None:
    expected, _ = trained(parted.one_device(), loss_of)
    value, _ = trained(parted.replicas(2), loss_of, by="gradients")
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)


def test_is_written_in_steps_as_a_whole_variable_is() -> None:
    def written(repl: Any) -> np.ndarray:
        v = variable(repl)

        def step_fn() -> tf.Tensor:
            i = tf.cast(repl.replica_id, tf.float32)
            v.assign_add(tf.ones_like(INITIAL) * i)  # the mean over all replicas
            v.scatter_add(tf.IndexedSlices(tf.ones([1, COLUMNS]) * (1 + i), [8]))
            v[0, 0].assign(i)
            v.scatter_nd_add([[1, 1]], [2.0 * i])
            return v.read_value()

        read = repl.run(step_fn)
        for value in read:
            np.testing.assert_allclose(value, v.numpy(), rtol=1e-6)
        return v.numpy()

    whole = replicator.Replicator(["CPU:0", "CPU:1"], variables="mirrored")
    for axis in (0, 1):
        repl = parted.replicas(2, parted.InParts(2, axis))
        np.testing.assert_allclose(written(repl), written(whole), rtol=1e-6)


def test_is_written_and_read_in_order_in_a_step() -> None:
    repl = parted.replicas(2)
    v = variable(repl)

    def step_fn() -> Any:
        before = tf.gather(v, [8])
        v.assign(tf.zeros_like(INITIAL))
        return before, tf.gather(v, [8]), v.read_value()

    before, after, value = repl.run(step_fn)
    np.testing.assert_array_equal(before[1], INITIAL[8:])
    np.testing.assert_array_equal(after[1], np.zeros([1, COLUMNS]))
    np.testing.assert_array_equal(value[0], np.zeros_like(INITIAL))


def test_is_created_in_a_step_once() -> None:
    repl = parted.replicas(2)
    results = []

    def step_fn() -> tf.Tensor:
        v = tf.Variable(INITIAL, name="inside")
        results.append(v)
        v.assign_add(tf.ones_like(INITIAL))
        return v.read_value()

    for k in (1, 2):
        np.testing.assert_allclose(repl.run(step_fn)[1], INITIAL + k, rtol=1e-5)
    assert isinstance(results[0], PartitionedVariable)
    assert all(one is results[0] for one in results)


def test_a_tf_function_that_runs_steps_reads_what_they_wrote() -> None:
    repl = parted.replicas(2)
    v = variable(repl)

    @tf.function
    def steps() -> tf.Tensor:
        repl.run(lambda: v.assign_add(tf.ones_like(INITIAL)))
        return v.read_value()

    np.testing.assert_allclose(steps(), INITIAL + 1, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_trains_in_a_session(axis: int) -> None:
    def trained(repl: Any) -> np.ndarray:
        with tf.Graph().as_default():
            v = variable(repl)
            with repl.context():
                adam = tf.compat.v1.train.AdamOptimizer(0.1)
                optimizer = repl.wrap_optimizer(adam, op="sum")

            def step_fn(ids: tf.Tensor) -> Any:
                loss = lookup(v, ids) + tf.reduce_sum(tf.one_hot(ids, ROWS) @ v)
                return optimizer.minimize(loss, var_list=[v])

            def input_fn(ctx: Any) -> tf.Tensor:
                return tf.constant(np.split(IDS, ctx.num_replicas)[ctx.replica_id])

            result = repl.run(step_fn, input_fn)
            with tf.compat.v1.Session() as session:
                missing = tf.compat.v1.report_uninitialized_variables()
                session.run(tf.compat.v1.global_variables_initializer())
                assert not len(session.run(missing))
                repl.initialize(session)
                np.testing.assert_array_equal(session.run(v), INITIAL)
                for _ in range(2):
                    session.run(result)
                value = session.run(v)
                v.load(INITIAL, session)
                np.testing.assert_array_equal(session.run(v), INITIAL)
                return value

    expected = trained(parted.one_device())
    repl = parted.replicas(2, parted.InParts(2, axis))
    np.testing.assert_allclose(trained(repl), expected, rtol=1e-5, atol=1e-5)


# --- Errors ---------------------------------------------------------------------------


def read_by_handle(v: Any) -> Any:
    return tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=tf.float32)


def write_by_handle(v: Any) -> Any:
    value = tf.ones_like(INITIAL)
    return tf.raw_ops.AssignAddVariableOp(resource=v.handle, value=value)


def read_by_handle_in_a_branch(v: Any) -> Any:
    return tf.cond(
        tf.reduce_sum(v) > -1e9, lambda: read_by_handle(v), lambda: tf.zeros([ROWS, 4])
    )


def shape_by_handle(v: Any) -> Any:
    return tf.raw_ops.VariableShape(input=v.handle)


def shape_by_handle_in_a_branch(v: Any) -> Any:
    return tf.cond(
        tf.reduce_sum(v) > -1e9, lambda: shape_by_handle(v), lambda: tf.constant([0, 0])
    )


def shape_by_handle_in_a_function(v: Any) -> Any:
    return tf.function(lambda: shape_by_handle(v) + 1)()


def test_the_shape_behind_the_handle_is_the_shape_of_the_whole() -> None:
    repl = parted.replicas(2)
    v = variable(repl)
    results = repl.run(lambda: (shape_by_handle(v), shape_by_handle(v) + 1))
    for returned, used in zip(*results, strict=True):
        np.testing.assert_array_equal(returned, INITIAL.shape)
        np.testing.assert_array_equal(used, np.add(INITIAL.shape, 1))


def test_a_shape_that_a_function_does_not_use_is_no_error() -> None:
    repl = parted.replicas(2)
    v = variable(repl)

    @tf.function
    def rows() -> tf.Tensor:
        shape_by_handle(v)
        return tf.gather(v, IDS)

    np.testing.assert_array_equal(repl.run(lambda: rows())[1], INITIAL[IDS])


@pytest.mark.parametrize(
    "use, op",
    [
        (shape_by_handle_in_a_branch, "VariableShape"),
        (shape_by_handle_in_a_function, "VariableShape"),
        (read_by_handle, "ReadVariableOp"),
        (write_by_handle, "AssignAddVariableOp"),
        (read_by_handle_in_a_branch, "ReadVariableOp"),
    ],
)
def test_what_reaches_for_the_whole_value_by_the_handle_is_refused(
    use: Callable[..., Any], op: str
) -> None:
    repl = parted.replicas(2)
    v = variable(repl)
    message = (
        f"(?s)replica 0.*table:0.*{op}.*3 parts.*test_partitioned.py.*Fix: .*whole"
    )
    with pytest.raises(replicator.UnsupportedError, match=message):
        repl.run(lambda: use(v))
    np.testing.assert_array_equal(v.numpy(), INITIAL)


def test_a_compiled_function_is_refused() -> None:
    repl = parted.replicas(2)
    v = variable(repl)

    @tf.function(jit_compile=True)
    def compiled() -> tf.Tensor:
        return tf.reduce_sum(v**2)

    message = r"(?s)jit_compile=True.*table:0.*3 parts.*test_partitioned.py.*Fix: read"
    with pytest.raises(replicator.UnsupportedError, match=message):
        repl.run(lambda: compiled())
    with pytest.raises(replicator.UnsupportedError, match=message):
        compiled()


def test_an_optimizer_that_writes_by_the_handle_outside_of_steps_is_refused() -> None:
    v = variable(parted.replicas(2))
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(1.0)
    message = r"(?s)table:0 .*outside a step.*3 parts.*test_partitioned.py.*Fix: wrap"
    with pytest.raises(replicator.ContextError, match=message):
        optimizer.apply_gradients([(tf.ones_like(INITIAL), v)])
    np.testing.assert_array_equal(v.numpy(), INITIAL)


# --- Any parts ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed",
    [*range(4), *(pytest.param(s, marks=pytest.mark.slow) for s in range(4, 40))],
)
def test_any_parts_anywhere_train_as_one_device_does(seed: int) -> None:
    random = np.random.RandomState(seed)
    count = random.randint(1, 4)
    shape = random.randint(2, 7, random.randint(1, 4)).tolist()
    axis = random.randint(len(shape))
    cuts = np.sort(
        random.choice(range(1, shape[axis]), random.randint(shape[axis]), replace=False)
    )
    sizes = np.diff([0, *cuts, shape[axis]]).tolist()
    placements = [
        Mirrored() if random.rand() < 0.3 else Owned(random.randint(count))
        for _ in sizes
    ]
    initial = random.randn(*shape).astype(np.float32)
    ids = random.permutation(np.repeat(np.arange(shape[0]), 6))[:6]
    weights = random.randn(*shape).astype(np.float32)

    def trained(repl: Any) -> np.ndarray:
        with repl.context():
            v = tf.Variable(initial)
            adam = tf.keras.optimizers.Adam(0.1)
            optimizer = repl.wrap_optimizer(adam, op="sum")

        def input_fn(ctx: Any) -> tf.Tensor:
            return tf.constant(np.split(ids, ctx.num_replicas)[ctx.replica_id])

        def step_fn(own: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                share = tf.cast(tf.size(own), tf.float32) / 6
                loss = tf.reduce_sum(tf.gather(v, own) ** 2)
                if seed % 2:
                    loss += share * tf.reduce_sum(tf.sin(v) * weights)
            optimizer.apply([tape.gradient(loss, v)], [v])

        for _ in range(2):
            repl.run(step_fn, input_fn)
        return v.numpy()

    repl = parted.replicas(count, parted.As(parted.chosen(axis, sizes, placements)))
    expected = trained(parted.one_device())
    np.testing.assert_allclose(trained(repl), expected, rtol=1e-4, atol=1e-5)


def test_layers_of_legacy_keras_keep_the_variable_and_not_its_rows():
    repl = replicator.Replicator(["CPU:0", "CPU:1"], strategy=strategy.PartitionedPS())
    with repl.context():
        layer = tf_keras.layers.Dense(2)
        layer.build([None, 4])
    assert isinstance(layer.kernel, PartitionedVariable)
    assert list(map(id, layer.trainable_variables)) == [
        id(layer.kernel),
        id(layer.bias),
    ]
