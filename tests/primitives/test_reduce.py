# SPDX-License-Identifier: Apache-2.0
"""reduce: the result of all_reduce, on the root alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.primitives.reductions import REDUCTIONS
from tests import helpers

DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "float32", "complex64"]


def _values(dtype: str, count: int) -> list[tf.Tensor]:
    rng = np.random.RandomState(3)
    numbers = rng.uniform(-2, 3, [count, 2, 5])
    return [
        tf.cast(value > 0 if dtype == "bool" else value, dtype) for value in numbers
    ]


def _kind(dtype: str) -> str:
    kind = tf.as_dtype(dtype)
    if kind.is_bool:
        return "bool"
    if kind.is_complex:
        return "complex"
    return "floating" if kind.is_floating else "integer"


PAIRS = [
    (op, dtype)
    for op in REDUCTIONS
    for dtype in DTYPES
    if _kind(dtype) in REDUCTIONS[op].kinds
]


@pytest.mark.battery(5)
@pytest.mark.parametrize(("op", "dtype"), PAIRS)
def test_the_root_receives_the_bits_of_all_reduce(op: str, dtype: str) -> None:
    repl = helpers.make(3, algorithm="hub")
    values = _values(dtype, 3)

    def step() -> list[Any]:
        x = helpers.opaque(values[repl.replica_id])
        reduced = tf.nest.flatten(repl.reduce(x, 1, op))
        reduced = reduced if repl.replica_id == 1 else [tf.zeros([])] * 2
        return [tf.nest.flatten(repl.all_reduce(x, op)), reduced[: 1 + ("arg" in op)]]

    everywhere, at_root = repl.run(step)
    for all_reduced, reduced in zip(everywhere, at_root, strict=True):
        assert all_reduced[1].dtype == reduced[1].dtype
        assert all_reduced[1].numpy().tobytes() == reduced[1].numpy().tobytes()


@pytest.mark.parametrize("mode", helpers.MODES)
def test_any_nest_and_nothing_on_the_others(mode: str) -> None:
    repl = helpers.make(3)

    def step() -> Any:
        r = repl.replica_id
        result = repl.reduce({"b": [helpers.opaque(r), 2.0], "a": ()}, root=2)
        empty = repl.reduce([], root=2)
        if r != 2:
            assert result is None and empty is None
            return {"b": [tf.constant(-1), tf.constant(-1.0)], "a": ()}
        assert empty == []
        return result

    result = helpers.run(mode, repl, lambda: step)
    assert [int(x) for x in result["b"][0]] == [-1, -1, 3]
    assert [float(x) for x in result["b"][1]] == [-1.0, -1.0, 6.0]


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_slices_stay_sparse(op: str) -> None:
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        r = repl.replica_id
        rows = helpers.opaque(tf.fill([r, 2], 3.0))
        slices = tf.IndexedSlices(
            rows, tf.zeros([r], tf.int32) + r, tf.constant([3, 2])
        )
        result = repl.reduce(slices, root=0, op=op)
        assert (result is None) == (r != 0)
        return tf.zeros([]) if result is None else tf.convert_to_tensor(result)

    dense = repl.run(step)[0]
    total = np.array([[0, 0], [3, 3], [6, 6]])
    np.testing.assert_allclose(dense, total / (3 if op == "mean" else 1))


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_slices_are_those_of_all_reduce(op: str, dtype: str) -> None:
    """Each row once, and sums of 16 bits rounded once."""
    repl = helpers.make(3)

    def step() -> Any:
        values = tf.constant([[0.1], [1e3], [1e-3]], dtype) * (1 + repl.replica_id)
        slices = tf.IndexedSlices(values, tf.constant([2, 0, 2]), tf.constant([4, 1]))
        one, all_ = repl.reduce(slices, 1, op), repl.all_reduce(slices, op)
        one = all_ if one is None else one
        return one.values, one.indices, all_.values, all_.indices

    values, indices, all_values, all_indices = repl.run(step)
    assert indices[1].numpy().tolist() == all_indices[1].numpy().tolist() == [2, 0]
    assert values[1].numpy().tobytes() == all_values[1].numpy().tobytes()


@pytest.mark.parametrize("known", [True, False])
def test_slices_with_more_rows_than_indices_are_refused(known: bool) -> None:
    """Another replica's indices would be taken for theirs."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        r = repl.replica_id
        values = helpers.opaque(tf.ones([3 - 2 * r, 1]), () if known else [None, 1])
        indices = helpers.opaque(tf.constant([0, 1]), () if known else [None])
        rows = repl.reduce(tf.IndexedSlices(values, indices, tf.constant([2, 1])))
        return tf.zeros([2, 1]) if rows is None else tf.convert_to_tensor(rows)

    error = errors.ArgumentError if known else tf.errors.InvalidArgumentError
    with pytest.raises(error, match=r"(?s)reduce on replica .*Fix: give each row its"):
        repl.run(step)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "prod", "argmax"])
def test_second_derivatives_of_a_linear_loss_are_zero(op: str) -> None:
    """The gradient of the root's loss is a constant there, and is still sent to all."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque([2.0, 3.0]) + repl.replica_id
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = repl.reduce(x, 0, op)
                y = tf.zeros([]) if y is None else y.value if "arg" in op else y
                loss = repl.linked(tf.reduce_sum(y))
            slope = repl.linked(tf.reduce_sum(tape.gradient(loss, x) * [5.0, 7.0]))
        return outer.gradient(slope, x, unconnected_gradients="zero")

    first, second = repl.run(step)
    # Of a product, each one's gradient is the other's value.
    want = [5.0, 7.0] if op == "prod" else [0.0, 0.0]
    np.testing.assert_array_equal(first, want)
    np.testing.assert_array_equal(second, want)


def test_a_loss_that_does_not_matter_to_the_root_needs_no_link() -> None:
    """Then no replica differentiates the call."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            repl.reduce(x)
            loss = x**2
        return tape.gradient(loss, x)

    assert [float(d) for d in repl.run(step)] == [6.0, 6.0]


BAD = {
    "op": (lambda repl: repl.reduce(1.0, 0, "avg"), "op='avg'", "op is one of sum"),
    "dtype": (
        lambda repl: repl.reduce(1, 0, "mean"),
        "the mean of int32 tensors",
        "cast to a float",
    ),
    "slices": (
        lambda repl: repl.reduce(tf.IndexedSlices(tf.ones([1]), [0], [3]), 0, "max"),
        "the max of IndexedSlices",
        "convert_to_tensor",
    ),
    "object": (lambda repl: repl.reduce(object()), "not a tensor", "pass"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_refused(name: str) -> None:
    call, message, fix = BAD[name]
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)reduce on replica 0 .*{message}.*at tests.*Fix: .*{fix}",
    ):
        repl.run(lambda: call(repl))


@pytest.mark.parametrize("primitive", ["reduce", "reduce_scatter"])
def test_a_mean_over_shards_of_different_sizes_is_refused(primitive: str) -> None:
    repl = helpers.make(2)
    x = np.arange(10, dtype=np.float32).reshape(5, 2) ** 2

    def step(x: tf.Tensor, op: str = "mean") -> Any:
        factor = 1.0 if op == "mean" else repl.weight
        reduced = getattr(repl, primitive)(tf.reduce_mean(x, 0) * factor, op=op)
        return tf.zeros([0]) if reduced is None else reduced

    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s){primitive} on replica 0 was given op='mean', which counts all "
        rf"replicas the same.*at tests.*Fix:.*{primitive}\(x \* repl.weight\)",
    ):
        repl.run(step, x, input_mode="global_batch")
    summed = repl.run(lambda x: step(x, "sum"), x, input_mode="global_batch")
    np.testing.assert_allclose(tf.concat([*summed], 0), x.mean(0), rtol=1e-6)
    even = repl.run(step, x[:4], input_mode="global_batch")
    np.testing.assert_allclose(tf.concat([*even], 0), x[:4].mean(0), rtol=1e-6)
