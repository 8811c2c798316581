# SPDX-License-Identifier: Apache-2.0
"""input_mode="global_batch": elements are split, and means are those of the whole."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl import logging

from replicator import CloneError, ContextError, InputError, PerReplica
from tests import helpers


def _data(size: int = 10, batch: int = 4) -> tf.data.Dataset:
    x = np.arange(float(size), dtype=np.float32)[:, None] ** 1.5
    return tf.data.Dataset.from_tensor_slices((x, 2 * x + 1)).batch(batch)


@pytest.mark.battery(5)
@pytest.mark.parametrize("source", ["Dataset", "input_fn", "context"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_elements_are_split_in_order(mode: str, replicas: int, source: str) -> None:
    repl = helpers.make(replicas)
    calls = []

    def input_fn(*ctx: Any) -> Any:
        calls.append(ctx)
        return _data()

    def with_context(ctx: Any) -> Any:
        assert (ctx.num_pipelines, ctx.num_replicas) == (1, replicas)
        return input_fn()

    sources = {"Dataset": _data, "input_fn": lambda: input_fn}
    sources["context"] = lambda: with_context
    with tf.Graph().as_default() if mode == "session" else tf.init_scope():
        data = sources[source]()
        step_fn: Any = lambda x, y: (x, repl.weight)  # noqa: E731
        run: Any = lambda: repl.run(step_fn, data, input_mode="global_batch")  # noqa: E731
        if mode == "session":
            fetches = run()
            session = tf.compat.v1.Session()
            repl.initialize(session)
            call: Any = lambda: session.run(fetches)  # noqa: E731
        else:
            call = tf.function(run) if mode == "function" else run
        for size in (4, 4, 2):
            x, weight = call()
            sizes = [len(shard) for shard in x]
            assert sizes == sorted(sizes, reverse=True) and sum(sizes) == size
            assert sizes[0] - sizes[-1] <= 1
            np.testing.assert_allclose(weight, np.array(sizes) / size, rtol=1e-6)
        with pytest.raises(tf.errors.OutOfRangeError):
            call()
    assert len(calls) == (source != "Dataset")


@pytest.mark.parametrize("source", ["function", "tensors", "arrays"])
def test_other_inputs_are_split_as_well(source: str) -> None:
    repl = helpers.make(2)
    batch = np.arange(5.0), np.arange(5)
    sources: dict[str, Any] = {"arrays": batch}
    sources["tensors"] = lambda: tf.nest.map_structure(tf.constant, batch)
    sources["function"] = lambda: sources["tensors"]
    actual = repl.run(lambda x, y: (x, y), sources[source], input_mode="global_batch")
    for values in actual:
        assert [v.numpy().tolist() for v in values] == [[0, 1, 2], [3, 4]]


@pytest.mark.battery(5)
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_training_is_that_of_one_device(mode: str, replicas: int) -> None:
    """Batches of 4, 4 and 2 examples, also where a replica has none of them."""
    repl = helpers.make(replicas)

    def make_step() -> Any:
        w = tf.Variable([[0.5]])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.001, 0.9))

        def step_fn(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w - y) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])
            return repl.all_reduce(loss, "mean")

        return step_fn

    with tf.Graph().as_default() if mode == "session" else contextlib.nullcontext():
        with repl.context():
            step_fn = make_step()
        data = _data()
        run: Any = lambda: repl.run(step_fn, data, input_mode="global_batch")  # noqa: E731
        if mode == "session":
            fetches = run()
            with tf.compat.v1.train.MonitoredSession() as session:
                losses = [session.run(fetches)[0] for _ in range(3)]
        else:
            call = tf.function(run) if mode == "function" else run
            losses = [float(call()[0]) for _ in range(3)]

    w, velocity, expected = 0.5, 0.0, []
    for x, y in _data().as_numpy_iterator():
        expected.append(np.mean((x * w - y) ** 2))
        velocity = 0.9 * velocity - 0.001 * np.mean(2 * x * (x * w - y))
        w += velocity
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_copies_are_given_arrays_that_divide_or_a_dataset() -> None:
    repl = helpers.make(3, build="clone")
    x = np.arange(5, dtype=np.float32)

    def step_fn(x: Any) -> Any:
        return repl.all_reduce(tf.reduce_mean(x), "mean", repl.weight)

    with pytest.raises(
        CloneError,
        match="(?s)one dtype and static shape.*Fix: .*must divide evenly .*Da",
    ):
        repl.run(step_fn, x, input_mode="global_batch")
    data = tf.data.Dataset.from_tensor_slices(x).batch(5)
    assert float(repl.run(step_fn, data, input_mode="global_batch")) == 2.0
    assert float(repl.run(step_fn, x[:3], input_mode="global_batch")) == 1.0


def test_copies_of_replicas_weigh_their_own_shards() -> None:
    repl = helpers.make(4, build="clone")
    data = tf.data.Dataset.range(6).batch(6)
    actual = repl.run(
        lambda x: (tf.shape(x)[0], repl.weight), data, input_mode="global_batch"
    )
    assert [int(v) for v in actual[0]] == [2, 2, 1, 1]
    np.testing.assert_allclose(actual[1], np.array([2, 2, 1, 1]) / 6, rtol=1e-6)


def test_several_steps_per_call_have_weights_of_their_own() -> None:
    repl = helpers.make(2)
    data = tf.data.Dataset.range(7).batch(4)
    actual = repl.run(
        lambda x: repl.weight, data, input_mode="global_batch", steps_per_call=2
    )
    np.testing.assert_allclose(actual, [[1 / 2, 2 / 3], [1 / 2, 1 / 3]], rtol=1e-6)


def test_replicas_weigh_alike_elsewhere() -> None:
    repl = helpers.make(2)

    def step_fn(x: Any) -> Any:
        assert repl.weight is None
        return repl.all_reduce(tf.cast(x, tf.float32), "mean", weight=repl.weight)

    assert float(repl.run(step_fn, tf.data.Dataset.range(2))) == 0.5
    with pytest.raises(ContextError, match="weight was called outside a step"):
        _ = repl.weight


def test_what_has_no_first_axis_cannot_be_split() -> None:
    repl = helpers.make(2)
    with pytest.raises(InputError, match="(?s)nothing in it has a first axis.*batch"):
        repl.run(lambda x: x, tf.data.Dataset.range(4), input_mode="global_batch")


@pytest.mark.battery(5)
@pytest.mark.parametrize("variables", ["mirrored", "sharded"])
@pytest.mark.parametrize("mode", ["eager", "function"])
def test_a_shard_without_examples_leaves_metrics_as_they_are(
    mode: str, variables: str
) -> None:
    """Means of no examples are NaN, and would stay in the sums for good."""
    repl = helpers.make(3, variables=variables)
    with repl.context():
        model = tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        model.optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.1))
        mean = tf.keras.metrics.Mean()
        error = tf.keras.metrics.MeanSquaredError()
        last = tf.Variable(5.0, synchronization=tf.VariableSynchronization.ON_READ)

    def step_fn(x: Any, y: Any) -> Any:
        mean.update_state(tf.reduce_mean(x))
        error.update_state(y, 0 * y)
        last.assign(tf.reduce_mean(x))
        return model.train_step((x, y))

    x, y = np.ones([2, 2], np.float32), np.full([2, 1], 3, np.float32)

    def call() -> None:
        repl.run(step_fn, (x, y), input_mode="global_batch")

    for _ in range(2):
        (tf.function(call) if mode == "function" else call)()
    results = {**model.get_metrics_result(), "last": last}
    assert all(np.isfinite(float(value)) for value in results.values()), results
    assert float(error.result()) == 9.0
    assert [float(c) for c in last.components] == [1.0, 1.0, 5.0]
    model.reset_metrics()

    def resetting(x: Any, y: Any) -> None:
        mean.reset_state()

    assert np.isfinite(float(mean.result()))
    repl.run(resetting, (x, y), input_mode="global_batch")
    assert float(mean.total) == 0.0


@pytest.mark.parametrize("compressor", [None, "fp16"])
@pytest.mark.parametrize("size", [1, 3, 4, 5])
def test_a_mean_is_that_of_all_examples_unless_weights_are_given(
    size: int, compressor: str | None
) -> None:
    x = np.arange(size, dtype=np.float32) + 1

    def run(op: str = "mean", **weights: Any) -> float:
        repl = helpers.make(2, build="trace")

        def step_fn(x: Any) -> Any:
            mean = tf.math.divide_no_nan(tf.reduce_sum(x), float(x.shape[0]))
            return repl.all_reduce(mean, op, compressor=compressor, **weights)

        return float(repl.run(step_fn, x, input_mode="global_batch"))

    halves = [h.mean() if h.size else 0.0 for h in np.array_split(x, 2)]
    np.testing.assert_allclose(run(), np.mean(x), rtol=1e-3)
    np.testing.assert_allclose(run(weight=None), np.mean(halves), rtol=1e-3)
    np.testing.assert_allclose(run(weight=1.0), np.mean(halves), rtol=1e-3)
    np.testing.assert_allclose(run("sum"), np.sum(halves), rtol=1e-3)


def test_args_alone_are_not_a_global_batch() -> None:
    repl, x = helpers.make(2), np.ones([4, 2], np.float32)
    for call in (repl.run, tf.function(repl.run), repl.build):
        with pytest.raises(
            InputError,
            match=r"(?s)splits the elements of input_fn, and there is none.*"
            r"test_global_batch\.py.*Fix: .*repl.run\(step_fn, \(x, y\)",
        ):
            call(lambda x, y: tf.shape(x), args=(x, x), input_mode="global_batch")


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_step_without_inputs_has_nothing_to_split(op: str) -> None:
    """As in a program whose Replicator splits what its other steps get."""
    repl = helpers.make(2, input_mode="global_batch")
    for run in (repl.run, tf.function(repl.run)):
        result = run(lambda: repl.all_reduce(float(repl.replica_id), op))
        assert float(result) == {"mean": 0.5, "sum": 1.0}[op]


ARGS = {
    "rows": (lambda y: y, True),
    "a tensor's rows": (tf.constant, True),
    "in a nest": (lambda y: {"y": y}, True),
    "a number": (lambda y: 0.1, False),
    "other rows": (lambda y: y[:3], False),
    "a value for each replica": (lambda y: PerReplica(y, y), False),
}


@pytest.mark.parametrize(("make", "warns"), ARGS.values(), ids=ARGS)
@pytest.mark.parametrize("source", ["array", "Dataset"])
def test_an_arg_with_a_row_for_each_example_is_warned_of(
    source: str, make: Any, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Any] = []
    monkeypatch.setattr(logging, "log_first_n", lambda *about: messages.append(about))
    repl, x = helpers.make(2), np.ones([4, 2], np.float32)
    data = tf.data.Dataset.from_tensors(x).repeat() if source == "Dataset" else x

    def step_fn(x: Any, y: Any) -> Any:
        return tf.shape(tf.nest.flatten(y)[0])

    call = tf.function(
        lambda: repl.run(
            step_fn, data, args=(make(x[:, :1]),), input_mode="global_batch"
        )
    )
    shapes = call()
    assert all(shape.numpy().tolist() == shapes[0].numpy().tolist() for shape in shapes)
    said = [message[1] % message[3:] for message in messages]
    assert len(said) == warns
    for text in said:
        assert "args[0] at tests/inputs/test_global_batch.py:" in text, text
        assert "has 4 rows" in text and "repl.run(step_fn, (x, y)" in text


def test_parsed_examples_weigh_the_same_whatever_the_number_of_their_values() -> None:
    def serialized(n: int) -> bytes:
        values = tf.train.FloatList(value=[float(n)] * (n + 1))
        feature = tf.train.Feature(float_list=values)
        features = tf.train.Features(feature={"ragged": feature, "sparse": feature})
        return tf.train.Example(features=features).SerializeToString()

    spec = {
        "ragged": tf.io.RaggedFeature(tf.float32),
        "sparse": tf.io.VarLenFeature(tf.float32),
    }
    examples = tf.data.Dataset.from_tensor_slices([serialized(n) for n in range(5)])
    batches = examples.batch(5).map(lambda batch: tf.io.parse_example(batch, spec))
    repl = helpers.make(2)

    def step(features: Any) -> Any:
        sums = [
            tf.reduce_sum(features["ragged"], axis=1),
            tf.sparse.reduce_sum(features["sparse"], axis=1),
        ]
        means = [tf.reduce_mean(each) for each in sums]
        return repl.all_reduce(means, "mean", repl.weight), repl.weight

    means, weights = repl.run(step, batches, input_mode="global_batch")
    np.testing.assert_allclose(list(weights), [0.6, 0.4], rtol=1e-6)
    for mean in means:  # sample n has n + 1 values of n
        np.testing.assert_allclose(list(mean), [8.0, 8.0])
