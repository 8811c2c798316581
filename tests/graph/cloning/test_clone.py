# SPDX-License-Identifier: Apache-2.0
"""With build="clone" a step computes the same as with build="trace"."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import sonnet as snt
import tensorflow as tf
import tf_keras

import replicator
from tests import helpers

Step = Callable[..., Any]


def batches(ctx: replicator.InputContext) -> tf.Tensor:
    """Returns a different [2, 4] batch for each replica."""
    values = np.random.default_rng(ctx.replica_id).standard_normal((2, 4))
    return tf.constant(values, tf.float32)


def weights(*shape: int) -> tf.Variable:
    """Returns a variable with values of all kinds."""
    size = int(np.prod(shape))
    return tf.Variable(np.sin(np.arange(size)).reshape(shape).astype(np.float32))


def momentum(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """A layer, trained by SGD with momentum."""
    w = weights(4, 3)
    optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1, momentum=0.9))
    optimizer.build([w])

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.matmul(x, w) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        return {"own": loss, "mean": repl.all_reduce(loss, "mean"), "none": None}

    return step, [w, *optimizer.variables]


def normalization(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Batch normalization and dropout of Keras, which have their own variables."""
    layers = [
        tf.keras.layers.BatchNormalization(),
        tf.keras.layers.Dropout(0.5, seed=3),
    ]
    for layer in layers:
        layer.build((None, 4))

    def step(x: tf.Tensor) -> Any:
        for layer in layers:
            x = layer(x, training=True)
        return x

    return step, [v for layer in layers for v in layer.variables]


def seeded(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Random ops with explicit seeds, in a branch too."""

    def step(x: tf.Tensor) -> Any:
        noise = tf.random.normal([3], seed=5)
        branch = tf.cond(
            tf.reduce_sum(x) > -100.0,
            lambda: tf.random.uniform([2], seed=6),
            lambda: tf.zeros([2]),
        )
        return noise, branch, tf.nn.dropout(x, 0.5, seed=7)

    return step, []


def control_flow(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Communication in a loop and in a branch of it, with gradients."""
    w = weights(4)

    def step(x: tf.Tensor) -> Any:
        def turn(n: tf.Tensor, y: tf.Tensor) -> Any:
            y = tf.cond(
                tf.equal(n % 2, 0),
                lambda: repl.all_reduce(y * w, "mean"),
                lambda: tf.sin(y) + repl.shift(y, 1),
            )
            return n + 1, y

        with tf.GradientTape() as tape:
            _, y = tf.while_loop(lambda n, y: n < 4, turn, [tf.constant(0), x])
            loss = tf.reduce_sum(y)
        return y, repl.all_reduce(tape.gradient(loss, w))

    return step, [w]


def function(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """A tf.function that writes a variable, and asserts."""
    total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    @tf.function
    def add(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(x, 100.0)
        total.assign(total + repl.all_reduce(tf.reduce_sum(x), "max"))
        return total.read_value()

    return lambda x: add(x), [total]


def sparse(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Rows of an embedding, trained by a step that returns nothing."""
    table = weights(6, 2)
    optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))
    optimizer.build([table])

    def step(x: tf.Tensor) -> None:
        rows = tf.cast(tf.abs(x[:, 0]) * 100, tf.int32) % 6
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    return step, [table]


def looked_up(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Lookups that TensorFlow builds by the device of the table."""
    table = weights(6, 2)
    optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))
    optimizer.build([table])

    def step(x: tf.Tensor) -> Any:
        ids = tf.sparse.from_dense(tf.cast(tf.abs(x) * 100, tf.int64) % 5 + 1)
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup_sparse(table, ids, None, combiner="sum")
            loss = tf.reduce_sum(rows**2)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        with tf.compat.v1.colocate_with(table):
            norms = tf.norm(table, axis=1)
        with tf.device(table.device):
            return rows, norms, tf.nn.embedding_lookup(table, ids.values, max_norm=1.0)

    return step, [table]


def built_by_the_first_call(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Layers whose first call, on replica 0, keeps tensors computed from constants."""
    layers = [
        tf.keras.layers.Normalization(mean=np.arange(4.0), variance=np.ones(4)),
        tf.keras.layers.Normalization(axis=None, mean=0.5, variance=2.0),
    ]
    kept: list[tf.Tensor] = []

    def step(x: tf.Tensor) -> Any:
        if not kept:
            kept.append(tf.range(4.0) * repl.num_replicas)
        return [layer(x) for layer in layers], x * kept[0]

    return step, []


def preprocessing(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Layers with statistics, bins, tables and constants, of both versions of Keras."""
    numbers = np.random.default_rng(0).normal(2.0, 3.0, [12, 4]).astype(np.float32)
    texts, counts = np.array([["a"], ["b"], ["c"]] * 4), np.arange(12)[:, None] % 5
    calls: list[tuple[Any, tf.Tensor | None]] = []  # a layer, and its own input
    for layers in (keras.layers, tf_keras.layers):
        adapted = (
            (layers.Normalization(), numbers),
            (layers.Discretization(num_bins=4), numbers),
            (layers.StringLookup(output_mode="tf_idf"), texts),
            (layers.IntegerLookup(), counts),
        )
        for layer, values in adapted:
            layer.adapt(values)
        calls += [(layer, None) for layer, _ in adapted[:2]]
        calls += [(layer, tf.constant(values)) for layer, values in adapted[2:]]
        calls += [
            (layers.CategoryEncoding(num_tokens=5), tf.constant(counts)),
            (layers.Hashing(num_bins=7), tf.constant(texts)),
            (layers.Rescaling(scale=0.1, offset=1.0), None),
        ]

    def step(x: tf.Tensor) -> Any:
        return [layer(x if given is None else given) for layer, given in calls]

    return step, []


def collectives(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Collectives and their gradients."""
    count = repl.num_replicas

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            rows = repl.all_gather(x, axis=0)
            part = repl.reduce_scatter(rows**2)
            moved = repl.shift(part, 1)
            y = repl.all_to_all(tf.concat([moved] * count, 0), 0, 1)
            loss = tf.reduce_sum(y * tf.cast(tf.range(tf.size(y)), y.dtype)[0])
        repl.barrier()
        return rows, part, moved, y, tape.gradient(loss, x)

    return step, []


def unlike_gradients(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Gradients that depend on the replica: of products, owners and broadcasts."""

    def gradient(x: tf.Tensor, call: Callable[[tf.Tensor], tf.Tensor]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(call(x) ** 2)
        return tape.gradient(loss, x)

    def step(x: tf.Tensor) -> Any:
        count = repl.num_replicas
        return (
            gradient(x, lambda x: repl.all_reduce(x, "prod")),
            gradient(x, lambda x: repl.all_reduce(x, "argmin").value),
            gradient(
                x, lambda x: repl.reduce_scatter(tf.tile(x, [count, 1]), "argmax").value
            ),
            gradient(x, lambda x: repl.broadcast(x, root=0)),
            tf.map_fn(lambda y: gradient(y, lambda y: repl.broadcast(y, root=1)), x),
            gradient(x, lambda x: gradient(x, lambda x: repl.all_reduce(x, "prod"))),
        )

    return step, []


def made_outside(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Small eager tensors, which TensorFlow captures as constants, in all places."""
    small, names = tf.constant(3.0), tf.constant(["a", "c"])
    lookup = tf.keras.layers.StringLookup(vocabulary=["a", "b"])
    words = tf.keras.layers.TextVectorization(
        vocabulary=["so", "it", "goes"], output_sequence_length=3
    )
    nested = tf.function(lambda x: x * small)

    def step(x: tf.Tensor) -> Any:
        y = tf.cond(x[0, 0] > 0.0, lambda: x * small, lambda: x - small)
        y = tf.while_loop(lambda y: y[0, 0] < small, lambda y: [y + small], [y])[0]
        return (
            repl.all_reduce(y + nested(x)),
            repl.all_reduce(small),
            lookup(names),
            words(tf.constant(["so it goes", "goes it"])),
            small,
        )

    return step, []


def built_in_step(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """A Sonnet model that replica 0 builds, in scopes that belong to no replica."""
    constant = snt.initializers.Constant
    net = snt.nets.MLP([3, 2], w_init=constant(0.1), b_init=constant(0.2))
    linear = snt.Linear(2)  # its initial value is a random op in the step
    optimizer = repl.wrap_optimizer(snt.optimizers.Momentum(0.1, 0.9))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = net(x)
            tf.debugging.assert_less(y, 100.0)  # its message names the tensor
            loss = tf.reduce_sum(y**2)
        trained = net.trainable_variables
        optimizer.apply(tape.gradient(loss, trained), trained)
        return loss, 0.0 * linear(x)

    return step, []


def asserting(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Assertions, which name their tensors and devices."""

    @tf.function
    def inside(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(x + 1.0, 100.0)
        return x

    def step(x: tf.Tensor) -> Any:
        y = x * 2.0
        tf.debugging.assert_less(y, 100.0, message="too large")
        tf.debugging.assert_near(y, y + 1e-9)
        tf.debugging.assert_equal(tf.shape(y)[0], 2)
        tf.debugging.assert_all_finite(y, "not finite")
        tf.debugging.Assert(tf.reduce_all(y < 100.0), [y.name, y])
        with tf.device(repl.devices[0]):
            tf.debugging.assert_less(y, 100.0)
        return tf.cond(y[0, 0] > 0.0, lambda: inside(y), lambda: inside(-y))

    return step, []


def scaled(factor: float, x: Any) -> Any:
    return x * factor


def in_python(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Python functions: closures of all kinds, with gradients, in a branch too."""
    w = weights(4, 3)

    class Scale:
        by = 3.0

        def __call__(self, x: Any) -> Any:
            return x * self.by

        def method(self, x: Any) -> Any:
            return x + self.by

    scale = Scale()

    def step(x: tf.Tensor) -> Any:
        number = 2.0

        def python(function: Callable[..., Any], x: tf.Tensor) -> tf.Tensor:
            y = tf.py_function(function, [x], tf.float32)
            y.set_shape(x.shape)
            return y

        with tf.GradientTape() as tape:
            y = python(lambda x: tf.sin(x) * number, tf.matmul(x, w))
            loss = tf.reduce_sum(python(scale, y) + python(scale.method, y))
        branch = tf.cond(loss > 0.0, lambda: python(lambda x: x / number, x), lambda: x)
        return (
            repl.all_reduce(tape.gradient(loss, w), "mean"),
            branch,
            tf.numpy_function(lambda x: x + np.float32(number), [x], tf.float32),
            python(functools.partial(scaled, number), x),
        )

    return step, [w]


def slices(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Slices of several sizes, and a root that is a copy."""
    count = repl.num_replicas

    def step(x: tf.Tensor) -> Any:
        rows = tf.tile(x, [count, 1])[: 2 * count - 1]
        splits = tf.constant([2] * (count - 1) + [1])
        with tf.GradientTape() as tape:
            tape.watch(rows)
            parts = (
                repl.reduce_scatter(rows),
                repl.all_to_all(rows, 0, 0, splits=splits),
                repl.broadcast(rows, root=2),
            )
            loss = tf.add_n([tf.reduce_sum(part**2) for part in parts])
        sums = [tf.reduce_sum(part) for part in parts]
        sums.append(tf.reduce_sum(repl.scatter(rows, root=1, axis=0)))
        return tape.gradient(loss, rows), repl.all_gather(sums)

    return step, []


def states(repl: replicator.Replicator) -> tuple[Step, list[Any]]:
    """Variables whose components differ, and are set in the step."""
    total = tf.Variable(
        0.0,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.SUM,
    )
    generator = tf.random.Generator.from_seed(3)

    def step(x: tf.Tensor) -> Any:
        total.assign(5.0)
        total.assign_add(tf.reduce_sum(x))
        before = generator.normal([2])
        generator.reset_from_seed(7)
        return total.read_value(), before, generator.normal([2])

    return step, [total]


PROBLEMS = {
    problem.__name__: problem
    for problem in (
        momentum,
        normalization,
        seeded,
        control_flow,
        function,
        sparse,
        looked_up,
        built_by_the_first_call,
        preprocessing,
        collectives,
        unlike_gradients,
        made_outside,
        built_in_step,
        asserting,
        in_python,
        slices,
        states,
    )
}


def outcome(build: str, mode: str, name: str, count: int) -> tuple[Any, list[Any]]:
    """Runs a problem for two steps; returns its results and all components."""
    repl = helpers.make(count, build=build)
    kept: list[Any] = []

    def make_step() -> Step:
        step, variables = PROBLEMS[name](repl)
        kept[:] = variables
        return step

    result = helpers.run(mode, repl, make_step, batches, steps=2)
    inside = kept if mode != "session" else []
    return result, [c for v in inside for c in helpers.components(v)]


# Steps of graphs whose copies TensorFlow builds otherwise than eagerly.
_GRAPHS = ("momentum", "control_flow", "function", "seeded")
_GRAPHS += ("built_in_step", "asserting", "in_python")


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("name", "mode", "count"),
    [
        *((name, "eager", count) for name in PROBLEMS for count in (3, 4)),
        *((name, mode, 3) for name in _GRAPHS for mode in ("function", "session")),
    ],
)
def test_copies_compute_what_built_replicas_do(
    name: str, mode: str, count: int
) -> None:
    expected, variables = outcome("trace", mode, name, count)
    result, copied = outcome("clone", mode, name, count)
    tf.nest.assert_same_structure(expected, result)
    ones = [*tf.nest.flatten(expected), *variables]
    for one, two in zip(ones, [*tf.nest.flatten(result), *copied], strict=True):
        np.testing.assert_array_equal(one, two)


def test_copies_draw_numbers_of_their_own() -> None:
    noise, branch, _ = outcome("clone", "eager", "seeded", 4)[0]
    assert len({value.tobytes() for value in noise}) == 4
    assert len({value.tobytes() for value in branch}) == 4


@pytest.mark.parametrize("replica_id", range(4))
def test_assertions_name_the_replicas_own_tensors(replica_id: int) -> None:
    repl = helpers.make(4, build="clone")

    def step(x: tf.Tensor) -> tf.Tensor:
        tf.debugging.assert_less(tf.identity(x, "mine"), 1.0)
        return x

    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        repl.run(step, lambda ctx: tf.constant(float(ctx.replica_id == replica_id)))
    assert f"replica_{replica_id}/mine" in str(caught.value)


@pytest.mark.battery(5)
@pytest.mark.parametrize("place", ["step", "branch", "function", "argument"])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_assertions_name_the_replicas_own_inputs(mode: str, place: str) -> None:
    """An assertion on an input names a tensor that no replica has built."""
    named: list[str] = []

    def check(x: tf.Tensor) -> tf.Tensor:
        if place == "argument":
            x = tf.compat.v1.get_default_graph().capture(x)
        named.append(x.name)
        with tf.control_dependencies([tf.debugging.assert_less(x, np.int64(2))]):
            return tf.identity(x)

    def step(batch: Any) -> tf.Tensor:
        _, x = batch
        if place == "step":
            return check(x)
        if place == "branch":
            return tf.cond(x < 5, lambda: check(x), lambda: x)
        return tf.function(lambda: check(x))()

    def run(highest: int) -> Any:
        elements = np.arange(4), np.arange(highest - 3, highest + 1)
        return helpers.run(
            mode,
            helpers.make(4, build="clone"),
            lambda: step,
            lambda: helpers.untuned(tf.data.Dataset.from_tensor_slices(elements)),
        )

    assert list(run(1)) == [-2, -1, 0, 1]
    assert len(named) == 1
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        run(2)
    assert "assertion failed" in str(caught.value)
    if place != "argument":  # a copied function's arguments have other names
        (asserted,) = {*re.findall(r"\[x \((.*?)\) = ", str(caught.value))}
        assert asserted != named[0] and "step_inputs" in asserted


def test_python_runs_once_for_all_replicas() -> None:
    """What Python counts or draws is the same on all, as in a tf.function."""
    repl = helpers.make(4, build="clone")
    calls: list[int] = []

    def step(x: tf.Tensor) -> Any:
        calls.append(1)
        seen: list[int] = []

        def note(x: Any) -> Any:
            seen.append(int(x))
            return np.int32(0)

        noted = tf.numpy_function(note, [x], tf.int32)
        with tf.control_dependencies([noted + repl.all_reduce(noted)]):
            total = tf.numpy_function(lambda: np.int32(sum(seen)), [], tf.int32)
        return repl.all_reduce(1), tf.constant(len(calls)), total

    results = repl.run(step, lambda ctx: tf.constant(ctx.replica_id))
    assert [[int(x) for x in column] for column in results] == [
        [4] * 4,
        [1] * 4,
        [6] * 4,
    ]
    assert len(calls) == 1


def test_variables_and_accumulators_made_in_a_step() -> None:
    def run(build: str) -> list[Any]:
        repl = helpers.make(3, build=build)
        with repl.context():
            w = weights(4)
            optimizer = repl.wrap_optimizer(
                tf.keras.optimizers.Adam(0.1), accumulation_steps=2
            )

        def step(x: tf.Tensor) -> tf.Tensor:
            counter = tf.Variable(0, synchronization=tf.VariableSynchronization.ON_READ)
            counter.assign_add(1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(x * w)
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])
            return counter

        for _ in range(3):
            counts = repl.run(step, batches)
        return [*map(np.asarray, counts), *helpers.components(w)]

    for one, two in zip(run("trace"), run("clone"), strict=True):
        np.testing.assert_array_equal(one, two)


def test_several_steps_per_call() -> None:
    def run(build: str) -> list[Any]:
        repl = helpers.make(3, build=build)
        with repl.context():
            step, (w, *_) = momentum(repl)

        def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
            rows = np.sin(np.arange(48, dtype=np.float32)).reshape(6, 2, 4)
            return helpers.untuned(
                tf.data.Dataset.from_tensor_slices(rows + ctx.replica_id)
            )

        call = repl.build(lambda x: step(x)["own"], input_fn, steps_per_call=3)
        return [np.asarray(call()), np.asarray(call()), *helpers.components(w)]

    for one, two in zip(run("trace"), run("clone"), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("given", ["input", "argument"])
def test_static_shapes_do_not_depend_on_the_values_of_inputs(
    given: str, mode: str
) -> None:
    """TensorFlow folds constants into shapes; those of replicas 0 and 1 are alike."""
    repl = helpers.make(4, build="clone")
    rows = [[1, 1, 1], [2, 2, 2], [1, 2, 3], [4, 4, 5]]

    def step(x: tf.Tensor) -> tf.Tensor:
        assert tf.get_static_value(x) is None
        unique, _ = tf.unique(x)
        return repl.all_gather(tf.reshape(unique, [tf.size(unique)]), axis=0)

    def input_fn(ctx: replicator.InputContext) -> tf.Tensor:
        return tf.constant(rows[ctx.replica_id])

    def run() -> list[tf.Tensor]:
        if given == "input":
            return list(repl.run(step, input_fn))
        values = [tf.constant(row) for row in rows]
        return list(repl.run(step, args=(replicator.PerReplica(values),)))

    if mode == "session":
        with tf.Graph().as_default():
            fetches = run()
            with helpers.monitored_session() as session:
                results = session.run(fetches)
    else:
        results = (tf.function(run) if mode == "function" else run)()
    for result in results:
        np.testing.assert_array_equal(result, [1, 2, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_inputs_that_are_one_tensor_on_replica_0_alone(mode: str) -> None:
    rows = [tf.constant([float(r), 1.0]) for r in range(4)]
    first, second = rows[:3], [rows[0], rows[2], rows[3]]

    def run(build: str) -> list[Any]:
        repl = helpers.make(3, build=build)
        args = replicator.PerReplica(first), replicator.PerReplica(second)

        def step(one: tf.Tensor, two: tf.Tensor) -> tf.Tensor:
            return one + 10.0 * two + 100.0 * rows[0]

        def call() -> list[Any]:
            return list(repl.run(step, args=args))

        return tf.function(call)() if mode == "function" else call()

    np.testing.assert_array_equal(run("clone"), run("trace"))


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_variable_on_the_first_replicas_device(mode: str) -> None:
    """An op of replica 0 on its own device may be there for the variable's sake."""
    repl = helpers.make(3, build="clone", variables="sharded")

    def make_step() -> Step:
        owned = [tf.Variable([float(k)] * 4) for k in range(3)]

        def step(x: tf.Tensor) -> Any:
            for v in owned:
                v.assign_add(repl.all_reduce(tf.ones([4])))
            branch = tf.cond(
                x[0, 0] > 0.0, lambda: tf.add_n([*owned]), lambda: owned[0] * 0.0
            )
            return tf.add_n([v.read_value() for v in owned]), branch

        return step

    total, branch = helpers.run(mode, repl, make_step, batches)
    for r in range(3):
        is_positive = float(np.random.default_rng(r).standard_normal()) > 0
        np.testing.assert_array_equal(total[r], [12.0] * 4)
        np.testing.assert_array_equal(branch[r], [12.0 * is_positive] * 4)


@pytest.mark.parametrize("build", ["trace", "clone"])
def test_a_layer_that_keeps_tensors_of_its_first_call(build: Any) -> None:
    """Keras 3 reads mean and variance in `build` only, which clones call once."""
    repl = helpers.make(3, build=build)
    with repl.context():
        layer = keras.layers.Normalization()

    def run() -> Any:
        return repl.run(lambda x: layer(x), lambda context: tf.ones([2, 4]))

    if build == "trace":
        with pytest.raises(
            replicator.ReplicatorError, match=r"(?s)test_clone.*Fix: .* layer "
        ) as caught:
            run()
        assert "before the step" in str(caught.value)
        with repl.context():
            layer = keras.layers.Normalization()
            layer.build((None, 4))
    for value in run():
        np.testing.assert_array_equal(value, np.ones([2, 4]))


def test_copies_wait_for_what_the_first_replica_waits_for() -> None:
    repl = helpers.make(2, build="clone")
    with tf.Graph().as_default():
        before = tf.no_op("before")

        def step_fn() -> tf.Tensor:
            with tf.control_dependencies([before]):
                return tf.identity(helpers.opaque(1.0))

        for result in repl.run(step_fn):
            assert before in helpers.ops_run(result)


@pytest.mark.parametrize("op", ["broadcast", "prod", "max"])
@pytest.mark.parametrize("around", ["conditional", "loop", "map"])
def test_copies_have_second_derivatives_of_their_own(around: str, op: str) -> None:
    """Gradients of control flow make constants anew, of the first replica's values."""

    def derivatives(build: str) -> list[np.ndarray]:
        repl = helpers.make(3, build=build)

        def product(x: tf.Tensor) -> tf.Tensor:
            sent = repl.broadcast(x, 1) if op == "broadcast" else repl.all_reduce(x, op)
            return sent * x

        def within(x: tf.Tensor) -> tf.Tensor:
            if around == "conditional":
                return tf.cond(tf.reduce_sum(x) < 1e9, lambda: product(x), lambda: x)
            if around == "map":
                return tf.map_fn(product, x[tf.newaxis])[0]
            turns = (0, x)
            turn = lambda t, y: (t + 1, product(y))  # noqa: E731
            return tf.while_loop(lambda t, _: t < 1, turn, turns)[1]

        def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(within(x) ** 2)
                first = inner.gradient(loss, x)
                total = tf.reduce_sum(first**2)
            return first, outer.gradient(total, x)

        results = repl.run(step, lambda ctx: np.float32([1, 2]) * (ctx.replica_id + 1))
        return [np.stack(list(one)) for one in results]

    for copied, traced in zip(derivatives("clone"), derivatives("trace"), strict=True):
        np.testing.assert_allclose(copied, traced, rtol=1e-5)
