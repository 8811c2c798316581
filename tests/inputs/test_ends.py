# SPDX-License-Identifier: Apache-2.0
"""The last elements, which do not fill a round: dropped with a warning, or padded."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import ArgumentError, InputError
from replicator.inputs import ends, moving
from tests import helpers


def _drain(call: Any) -> list[Any]:
    """Returns all calls' results, until the inputs end."""
    results = []
    while True:
        try:
            results.append(call())
        except tf.errors.OutOfRangeError:
            return results


def _rounds(
    mode: str, repl: Any, step_fn: Any, make: Any, **options: Any
) -> list[list[Any]]:
    """Returns each replica's results of all steps, until the inputs end."""
    if mode == "session":
        with tf.Graph().as_default():
            fetches = repl.run(step_fn, make(), **options)
            with tf.compat.v1.Session() as session:
                repl.initialize(session)
                return _drain(lambda: session.run(fetches))
    data = make()
    call: Any = lambda: repl.run(step_fn, data, **options)  # noqa: E731
    if mode == "function":
        call = tf.function(call)
    return [tf.nest.map_structure(np.asarray, results) for results in _drain(call)]


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "dropped" in message]


# --- Padded elements ------------------------------------------------------------------


def _batches(size: int, batch: int, dealt: bool) -> Any:
    """Returns the input: a Dataset that is dealt, or the replicas' own pipelines."""

    def own(ctx: Any) -> tf.data.Dataset:
        data = tf.data.Dataset.range(size).shard(ctx.num_replicas, ctx.replica_id)
        return data.batch(batch)

    return tf.data.Dataset.range(size).batch(batch) if dealt else own


@pytest.mark.battery(5)
@pytest.mark.parametrize("dealt", [True, False], ids=["dealt", "own"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_each_element_arrives_once(mode: str, replicas: int, dealt: bool) -> None:
    repl = helpers.make(replicas)
    for size in (0, 1, 4, 5, 8, 13):
        rounds = _rounds(
            mode,
            repl,
            lambda x: x,
            lambda size=size: _batches(size, 2, dealt),
            remainder="pad",
        )
        elements = [int(x) for batches in rounds for batch in batches for x in batch]
        assert sorted(elements) == list(range(size)), size
        each = size if dealt else math.ceil(size / replicas)  # of the longest pipeline
        batches = math.ceil(each / 2)
        assert len(rounds) == (math.ceil(batches / replicas) if dealt else batches)


@pytest.mark.battery(5)
@pytest.mark.parametrize("dealt", [True, False], ids=["dealt", "own"])
@pytest.mark.parametrize("mode", helpers.MODES)
def test_an_evaluation_over_all_elements_is_exact(mode: str, dealt: bool) -> None:
    repl = helpers.make(3)

    def step_fn(x: tf.Tensor) -> Any:
        mean = tf.reduce_mean(tf.cast(x, tf.float32))  # NaN without examples
        size = tf.cast(tf.shape(x)[0], tf.float32)
        return repl.all_reduce(mean, "mean", repl.weight), repl.all_reduce(size)

    rounds = _rounds(
        mode, repl, step_fn, lambda: _batches(13, 2, dealt), remainder="pad"
    )
    total = sum(float(mean[0] * size[0]) for mean, size in rounds)
    assert sum(float(size[0]) for _, size in rounds) == 13
    np.testing.assert_allclose(total / 13, 6.0, rtol=1e-6)


def test_metrics_of_keras_see_each_example_once() -> None:
    repl = helpers.make(3)
    with repl.context():
        metric = tf.keras.metrics.MeanSquaredError()
    x, y = np.arange(10.0)[:, None], np.arange(10.0)[:, None] ** 1.5
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(3)

    def step_fn(x: Any, y: Any) -> None:
        metric.update_state(y, x)

    _drain(lambda: repl.run(step_fn, data, remainder="pad"))
    np.testing.assert_allclose(float(metric.result()), np.mean((x - y) ** 2), rtol=1e-6)


def test_a_wrapped_optimizer_weighs_the_last_round_by_its_examples() -> None:
    """Keras' batch normalization, too, uses the statistics of real examples only."""
    repl = helpers.make(2)
    with repl.context():
        v = tf.Variable(0.0)
        norm = tf.keras.layers.BatchNormalization(momentum=0.0)
        norm.build([None, 1])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
    data = tf.data.Dataset.from_tensor_slices([[1.0], [2.0], [6.0]]).batch(3)

    def step_fn(x: tf.Tensor) -> None:
        norm(x, training=True)
        optimizer.apply_gradients([(tf.reduce_mean(x), v)])

    repl.run(step_fn, data, remainder="pad")
    assert float(v) == -3.0
    np.testing.assert_allclose(norm.moving_mean.numpy(), [3.0], rtol=1e-6)
    helpers.assert_replicas_equal([v])


def test_elements_of_every_structure_have_empty_ones() -> None:
    repl = helpers.make(2)
    element = {
        "dense": tf.ones([3, 2, 4]),
        "text": tf.constant([["a"], ["b"], ["c"]]),
        "ragged": tf.ragged.constant([[[1], [2, 3]], [], [[4]]]),
        "sparse": tf.sparse.from_dense([[1, 0], [0, 2], [3, 0]]),
    }
    data = tf.data.Dataset.from_tensors(element)

    def step_fn(x: Any) -> Any:
        assert x["dense"].shape.as_list() == [None, 2, 4]
        ragged, sparse = x["ragged"], x["sparse"]
        return (
            tf.shape(x["dense"]),
            tf.shape(x["text"]),
            ragged.nrows(),
            tf.shape(ragged.flat_values)[0],
            sparse.dense_shape,
            repl.weight,
        )

    actual = repl.run(step_fn, data, remainder="pad")
    first = [np.asarray(leaves[0]).tolist() for leaves in actual]
    assert first == [[3, 2, 4], [3, 1], 3, 4, [3, 2], 1.0]
    second = [np.asarray(leaves[1]).tolist() for leaves in actual]
    assert second == [[0, 2, 4], [0, 1], 0, 0, [0, 2], 0.0]


def test_initialize_starts_a_padded_input_over() -> None:
    repl = helpers.make(2)
    data = tf.data.Dataset.range(3).batch(1)
    step = repl.build(lambda x: tf.reduce_sum(x), data, remainder="pad")
    for _ in range(2):
        assert [[int(v) for v in values] for values in _drain(step)] == [[0, 1], [2, 0]]
        repl.initialize()


def test_copies_are_padded() -> None:
    repl = helpers.make(4, build="clone")
    data = tf.data.Dataset.range(10).batch(2)
    step = repl.build(lambda x: (tf.shape(x)[0], repl.weight), data, remainder="pad")
    rounds = _drain(step)
    assert [[int(v) for v in values[0]] for values in rounds] == [[2] * 4, [2, 0, 0, 0]]
    assert [float(v) for v in rounds[1][1]] == [1.0, 0.0, 0.0, 0.0]


def test_what_is_no_batch_cannot_be_padded() -> None:
    with pytest.raises(
        InputError, match=r"(?s)remainder=\"pad\".*TensorSpec.*first axis.*Fix: batch"
    ):
        helpers.make(2).run(lambda x: x, tf.data.Dataset.range(3), remainder="pad")


def test_a_remainder_is_one_of_two() -> None:
    for call in (helpers.make(2).run, helpers.make(2).build):
        with pytest.raises(ArgumentError, match="(?s)remainder='fill'.*drop, pad"):
            call(lambda x: x, tf.data.Dataset.range(3), remainder="fill")


# --- Dropped elements -----------------------------------------------------------------


def _filtered(size: int) -> tf.data.Dataset:
    """Returns a dataset that does not know its length."""
    return tf.data.Dataset.range(2 * size).filter(lambda x: x % 2 == 0)


@pytest.mark.parametrize("make", [tf.data.Dataset.range, _filtered])
@pytest.mark.parametrize("size", [4, 5, 7])
def test_what_is_dropped_is_said_once(
    size: int, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    repl = helpers.make(4)
    step = repl.build(lambda x: x, make(size))
    for _ in range(3):
        assert len(_drain(step)) == 1
        repl.initialize()
    message = _warnings(caplog)
    if size == 4:
        assert not message
        return
    assert len(message) == 1
    assert f"The last {size % 4} elements of a step's inputs were dropped" in message[0]
    assert "round of 4" in message[0] and 'remainder="pad"' in message[0]
    assert "test_ends.py:" in message[0]


def test_the_count_is_that_of_the_last_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """It restarts with the inputs, even within an epoch."""
    repl = helpers.make(3)
    step = repl.build(lambda x: x, _filtered(100))
    for _ in range(5):
        step()
        repl.initialize()
    assert len(_drain(step)) == 33
    (message,) = _warnings(caplog)
    assert "The last 1 elements" in message


def test_of_pipelines_that_differ_the_rest_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl = helpers.make(3)
    _drain(
        repl.build(lambda x: x, lambda ctx: tf.data.Dataset.range(2 + ctx.replica_id))
    )
    (message,) = _warnings(caplog)
    assert "The last 3 elements" in message


def test_in_a_function_it_is_said_when_it_is_built(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl, data = helpers.make(2), tf.data.Dataset.range(5)
    call = tf.function(lambda: repl.run(lambda x: x, data))
    call()
    (message,) = _warnings(caplog)
    assert "The last 1 elements of a step's inputs will be dropped" in message


def test_nothing_is_said_of_what_has_no_end_or_no_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repl = helpers.make(2)
    for data in (
        tf.data.Dataset.range(5).repeat(),
        tf.data.Dataset.range(6),
        _filtered(6),
    ):
        step = repl.build(lambda x: x, data)
        for _ in range(2):
            step()
    _drain(repl.build(lambda x: x, _filtered(6)))
    _drain(repl.build(lambda x: x, tf.data.Dataset.range(5).batch(1), remainder="pad"))
    split = tf.data.Dataset.range(5).batch(2)
    _drain(repl.build(lambda x: x, split, input_mode="global_batch"))
    _drain(helpers.make(1).build(lambda x: x, _filtered(5)))
    assert not _warnings(caplog)


@pytest.mark.parametrize("known", [True, False])
def test_after_a_failed_element_nothing_is_counted(
    known: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The second element fails, and the first is lost with its round."""
    bad = tf.Variable(1 if known else 2, dtype=tf.int64)

    def check(x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_none_equal(x, bad)]):
            return tf.identity(x)

    data = tf.data.Dataset.range(5) if known else _filtered(5)
    step = helpers.make(2).build(lambda x: x, data.map(check))
    with pytest.raises(tf.errors.InvalidArgumentError):
        step()
    _drain(step)
    (message,) = _warnings(caplog)
    assert "may have been dropped" in message and "How many is not known" in message
    assert 'remainder="pad"' in message
    caplog.clear()
    step.initialize()
    bad.assign(99)
    assert len(_drain(step)) == 2
    assert not _warnings(caplog)  # reported once


def test_of_unknown_length_the_last_round_is_counted() -> None:
    lengths = ends.Lengths([moving.Sited(_filtered(5))], 4)
    assert lengths.dropped(None) == 0
    assert [lengths.dropped(taken) for taken in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize("steps", [1, 2])
def test_the_last_round_is_counted_in_every_way(
    steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    for build in ("trace", "clone"):
        repl = helpers.make(4, build=build)
        step = repl.build(lambda x: x, _filtered(11), steps_per_call=steps)
        _drain(step)
        (message,) = _warnings(caplog)
        assert "The last 3 elements of a step's inputs were dropped" in message
        caplog.clear()


@pytest.mark.parametrize(
    ("sizes", "replicas", "rounds"),
    [
        ([7], 2, 3),  # is dealt
        ([5, 3], 2, 3),
        ([5, -1], 2, 5),
        ([-1, -1], 2, -1),
        ([-1], 3, -1),
        ([4, None], 2, None),
        ([None], 2, None),
    ],
)
def test_rounds(sizes: list[int | None], replicas: int, rounds: int | None) -> None:
    made = []
    for size in sizes:
        data = tf.data.Dataset.range(9 if size is None else abs(size))
        data = data.repeat() if size == -1 else data
        made.append(data.filter(lambda x: x < 4) if size is None else data)
    sited = [moving.Sited(data, None) for data in made]
    assert ends.Lengths(sited, replicas).rounds == rounds
