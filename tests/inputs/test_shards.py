# SPDX-License-Identifier: Apache-2.0
"""Shards are the split batch; their weights make means equal to one device's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import InputError, context
from replicator.inputs import shards
from tests import helpers

REPLICAS = [1, 2, 3, 5]
SIZES = [0, 1, 2, 3, 4, 7, 10]


def _counts(size: int, num_replicas: int) -> list[int]:
    """Returns NumPy's counts, an independent reference."""
    return [len(part) for part in np.array_split(np.zeros(size), num_replicas)]


def _dense(size: int) -> tf.Tensor:
    return tf.reshape(tf.range(size * 6), [size, 2, 3])


def _ragged(size: int) -> tf.RaggedTensor:
    lengths = [i % 3 for i in range(size)]
    values = tf.reshape(tf.range(2 * sum(lengths)), [-1, 2])
    return tf.RaggedTensor.from_row_lengths(values, tf.constant(lengths, tf.int32))


def _sparse(size: int) -> tf.SparseTensor:
    dense = np.arange(size * 4).reshape(size, 4)
    return tf.sparse.from_dense(tf.constant(dense * (dense % 3 == 0)))


KINDS: dict[str, Callable[[int], Any]] = {
    "dense": _dense,
    "ragged": _ragged,
    "sparse": _sparse,
    "string": lambda size: tf.constant([f"{i}" for i in range(size)], tf.string),
}


def _joined(parts: list[Any]) -> list[Any]:
    """Concatenates parts, as nested lists."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.to_dense(tf.sparse.concat(0, parts)).numpy().tolist()
    if isinstance(parts[0], tf.RaggedTensor):
        return sum((part.to_list() for part in parts), [])
    return np.concatenate([part.numpy() for part in parts]).tolist()


def _whole(value: Any) -> list[Any]:
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.to_dense(value).numpy().tolist()
    ragged = isinstance(value, tf.RaggedTensor)
    return value.to_list() if ragged else value.numpy().tolist()


@pytest.mark.battery(5)
@pytest.mark.parametrize("in_graph", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_behind_one_another_are_the_batch(kind: str, in_graph: bool) -> None:
    for replicas in REPLICAS:
        split: Any = functools.partial(shards.split, num_replicas=replicas)
        if in_graph:
            spec = _free(tf.type_spec_from_value(KINDS[kind](7)))
            split = tf.function(split, input_signature=[spec])
        for size in SIZES:
            batch = KINDS[kind](size)
            batch_shards = split(batch)
            assert [int(shard.count) for shard in batch_shards] == _counts(
                size, replicas
            )
            assert {int(shard.total) for shard in batch_shards} == {size}
            assert _joined([shard.element for shard in batch_shards]) == _whole(batch)


def _free(spec: Any) -> Any:
    """Returns a spec with any number of rows."""
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec([None, None, 2], spec.dtype, 1, tf.int32)
    shape = [None, *spec.shape[1:]]
    return type(spec)(shape, spec.dtype)


def test_a_nest_is_split_leaf_by_leaf() -> None:
    batch = {
        "x": (tf.range(5), tf.zeros([5, 2])),
        "scale": tf.constant(2.0),
        "no": None,
    }
    first, second = shards.split(batch, 2)
    assert first.element["x"][0].numpy().tolist() == [0, 1, 2]
    assert second.element["x"][1].shape == [2, 2]
    for shard in first, second:
        assert float(shard.element["scale"]) == 2.0 and shard.element["no"] is None


def test_arrays_are_split_as_tensors() -> None:
    first, second = shards.split((np.arange(4.0), np.arange(4)), 2)
    assert second.element[0].numpy().tolist() == [2.0, 3.0]
    assert int(first.count) == 2


def test_static_shapes_are_kept() -> None:
    shapes = []

    def shape(batch: Any) -> None:
        shapes.append([tuple(shard.element.shape) for shard in shards.split(batch, 2)])

    for spec in (
        tf.TensorSpec([4, 3]),
        tf.TensorSpec([None, 3]),
        tf.SparseTensorSpec([None, 3], tf.float32),
    ):
        tf.function(shape).get_concrete_function(spec)
    assert shapes == [[(2, 3)] * 2, [(None, 3)] * 2, [(None, 3)] * 2]


@pytest.mark.parametrize(
    "batch, said",
    [
        ((tf.zeros([4]), tf.zeros([3])), r"differ in their first dimension, 3, 4"),
        (tf.constant(1.0), "nothing in it has a first axis"),
        ((None, None), "nothing in it has a first axis"),
        (object(), "which cannot be split"),
    ],
)
def test_what_cannot_be_split_is_refused(batch: Any, said: str) -> None:
    with pytest.raises(InputError, match=f"(?s){said}.*Fix:"):
        shards.split(batch, 2)


def test_an_unknown_rank_is_refused() -> None:
    split = tf.function(lambda x: shards.split(x, 2))
    with pytest.raises(InputError, match="(?s)rank is unknown.*ensure_shape"):
        split.get_concrete_function(tf.TensorSpec(None))


def test_tensors_that_turn_out_to_differ_are_refused() -> None:
    spec = tf.TensorSpec([None])
    split = tf.function(
        lambda x, y: shards.split((x, y), 2), input_signature=[spec, spec]
    )
    split(tf.zeros([4]), tf.zeros([4]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="number of examples"):
        split(tf.zeros([4]), tf.zeros([3]))


# --- Weights of shards ----------------------------------------------------------------


@pytest.mark.battery(5)
@pytest.mark.parametrize("size", [1, 5, 6])
@pytest.mark.parametrize("replicas", [2, 3])
def test_optimizers_take_the_mean_over_the_examples(replicas: int, size: int) -> None:
    repl = helpers.make(replicas)
    with repl.context():
        v = tf.Variable([1.0, -1.0])
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.5))
    batch = tf.reshape(tf.range(2.0 * size) ** 2, [size, 2])

    def step_fn(shard: shards.Shard) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(shard.element * v)  # NaN for an empty shard
        context.require("a test").shard = shard
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])

    @tf.function
    def run() -> None:
        parts = iter(shards.split(batch, replicas))
        repl.run(step_fn, lambda: next(parts))

    run()
    with tf.GradientTape() as tape:
        one = tf.Variable([1.0, -1.0])
        loss = tf.reduce_mean(batch * one)
    expected = one - 0.5 * tape.gradient(loss, one)
    np.testing.assert_allclose(v, expected, rtol=1e-6)


def test_an_explicit_weight_and_a_sum_come_first() -> None:
    repl = helpers.make(2)
    with repl.context():
        v, w = tf.Variable(0.0), tf.Variable(0.0)
        mean = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        total = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0), op="sum")

    def step_fn(shard: shards.Shard) -> None:
        gradient = tf.reduce_sum(shard.element)  # 0 + 1 and 2
        context.require("a test").shard = shard
        mean.apply_gradients([(gradient, v)], weight=1.0)
        total.apply_gradients([(gradient, w)])

    parts = shards.split(tf.range(3.0), 2)
    repl.run(step_fn, lambda ctx: parts[ctx.replica_id])
    assert float(v) == -1.5 and float(w) == -3.0


def test_steps_of_any_size_weigh_alike_where_gradients_are_accumulated() -> None:
    repl = helpers.make(2)
    with repl.context():
        v = tf.Variable(0.0)
        optimizer = repl.wrap_optimizer(
            tf.keras.optimizers.SGD(1.0), accumulation_steps=2
        )
    spec = tf.TensorSpec([None])

    def step_fn(shard: shards.Shard) -> None:
        context.require("a test").shard = shard
        optimizer.apply_gradients([(tf.reduce_mean(shard.element), v)])

    @tf.function(input_signature=[spec])
    def run(batch: tf.Tensor) -> None:
        parts = iter(shards.split(batch, 2))
        repl.run(step_fn, lambda: next(parts))

    run(tf.constant([1.0, 2.0, 6.0]))  # a mean of 3
    run(tf.constant([5.0]))
    np.testing.assert_allclose(v, -4.0, rtol=1e-6)
