"""Reductions run in replica order: the bits of NumPy's sum from left to right.

TensorFlow's graph optimizer (Grappler) reorders sums where it may: operands by name,
constants together, equal operands into a multiple. Each of its occasions is a case.
Trees and rings combine in orders of their own, see test_algorithms.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

Operands = Callable[[replicator.Replicator, Sequence[np.ndarray]], Callable[[], Any]]


def _make(num_replicas: int, algorithm: str = "hub") -> replicator.Replicator:
    return helpers.make(num_replicas, algorithm=algorithm)


def _arrays(num_replicas: int, dtype: Any = np.float32, spread: int = 4) -> Any:
    """Numbers of such different sizes that the order of a sum shows."""
    rng = np.random.RandomState(num_replicas)
    arrays = [
        rng.randn(64) * 10 ** rng.uniform(-spread, spread, 64)
        for _ in range(num_replicas)
    ]
    return [array.astype(dtype) for array in arrays]


def _from_left(op: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    combine = {
        "sum": np.add,
        "mean": np.add,
        "prod": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
    }[op]
    result = functools.reduce(combine, arrays)
    if op == "mean":
        result = result / np.asarray(len(arrays), result.dtype)
    return result


def _opaque(repl: Any, arrays: Any) -> Callable[[], Any]:
    return lambda: helpers.opaque(arrays[repl.replica_id])


def _constants(repl: Any, arrays: Any) -> Callable[[], Any]:
    return lambda: tf.constant(arrays[repl.replica_id])


def _constants_at_the_end(repl: Any, arrays: Any) -> Callable[[], Any]:
    return lambda: (
        tf.constant(arrays[repl.replica_id])
        if repl.replica_id
        else helpers.opaque(arrays[0])
    )


def _constants_between(repl: Any, arrays: Any) -> Callable[[], Any]:
    return lambda: (
        tf.constant(arrays[repl.replica_id])
        if repl.replica_id % 2
        else helpers.opaque(arrays[repl.replica_id])
    )


def _captured(repl: Any, arrays: Any) -> Callable[[], Any]:
    """Eager tensors, captured in the opposite order: their names do not sort."""
    captured = [tf.constant(array) for array in arrays]

    def operand() -> tf.Tensor:
        for tensor in reversed(captured):
            tf.identity(tensor)
        return captured[repl.replica_id]

    return operand


def _common_factor(repl: Any, arrays: Any) -> Callable[[], Any]:
    scale = tf.constant(np.float32(0.1))
    return lambda: helpers.opaque(arrays[repl.replica_id] / np.float32(0.1)) * scale


def _constants_of_unknown_rank(repl: Any, arrays: Any) -> Callable[[], Any]:
    spec = [tf.TensorSpec(None, tf.float32)]
    function = tf.function(tf.identity, input_signature=spec)  # is inlined, and folded
    return lambda: function(tf.constant(arrays[repl.replica_id]))


OPERANDS = [
    _opaque,
    _constants,
    _constants_at_the_end,
    _constants_between,
    _constants_of_unknown_rank,
    _captured,
]


def _assert_bits(repl: Any, operand: Callable[[], Any], op: str, want: Any) -> None:
    run = repl.build(lambda: repl.all_reduce(operand(), op))
    for _ in range(2):
        for r, result in enumerate(run()):
            assert result.numpy().tobytes() == want.tobytes(), f"replica {r}"


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 8])
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
def test_bits_of_numpy(op: str, num_replicas: int) -> None:
    arrays = _arrays(num_replicas, spread=2)
    repl = _make(num_replicas)
    _assert_bits(repl, _opaque(repl, arrays), op, _from_left(op, arrays))


@pytest.mark.parametrize("algorithm", ["hub", "shuffled"])
@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("operands", OPERANDS[1:], ids=lambda f: f.__name__)
def test_bits_of_numpy_whatever_the_optimizer_may_fold(
    operands: Operands, op: str, algorithm: str
) -> None:
    arrays = _arrays(8, spread=2)
    repl = _make(8, algorithm)
    _assert_bits(repl, operands(repl, arrays), op, _from_left(op, arrays))


def test_the_order_of_the_arrays_shows() -> None:
    """Else this file would prove nothing."""
    arrays = _arrays(8)
    other = [arrays[0], *reversed(arrays[1:])]
    assert _from_left("sum", arrays).tobytes() != _from_left("sum", other).tobytes()


def test_a_common_factor_is_not_taken_out() -> None:
    arrays = _arrays(3)
    factors = [(a / np.float32(0.1)) * np.float32(0.1) for a in arrays]
    repl = _make(3)
    operand = _common_factor(repl, arrays)
    _assert_bits(repl, operand, "sum", _from_left("sum", factors))


@pytest.mark.parametrize("num_replicas", [3, 7, 8])
def test_equal_operands_are_not_multiplied(num_replicas: int) -> None:
    repl = _make(num_replicas)
    (array,) = _arrays(1)
    captured = tf.constant(array)
    want = _from_left("sum", [array] * num_replicas)
    _assert_bits(repl, lambda: captured, "sum", want)


@pytest.mark.parametrize("place", ["cond", "while"])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_equal_operands_in_control_flow(num_replicas: int, op: str, place: str) -> None:
    """Where Grappler's 2 * x for x + x hangs, or gives an empty tensor."""
    repl = _make(num_replicas)

    def reduced(x: tf.Tensor) -> tf.Tensor:
        return repl.all_reduce(repl.broadcast(x), op)

    def step() -> tf.Tensor:
        x = helpers.opaque(2.0 + repl.replica_id)
        if place == "cond":
            return tf.cond(helpers.opaque(True), lambda: reduced(x), lambda: x)
        turns = helpers.opaque(1)
        return tf.while_loop(
            lambda n, _: n < turns, lambda n, y: (n + 1, reduced(y)), [0, x]
        )[1]

    want = 2.0 * (num_replicas if op == "sum" else 1)
    assert [float(y) for y in repl.run(step)] == [want] * num_replicas


@pytest.mark.parametrize("mode", ["function", "session"])
def test_arguments_whose_names_do_not_sort(mode: str) -> None:
    arrays = _arrays(3)
    want = _from_left("sum", arrays).tobytes()
    repl = _make(3)
    names = ["z", "y", "x"]
    if mode == "session":
        with tf.Graph().as_default():
            fed = {
                tf.compat.v1.placeholder(tf.float32, [64], name): array
                for name, array in zip(names, arrays, strict=True)
            }
            by_replica = list(fed)
            out = repl.run(lambda: repl.all_reduce(by_replica[repl.replica_id]))
            with tf.compat.v1.Session() as session:
                results = session.run(list(out), fed)
    else:

        @tf.function
        def call(z: tf.Tensor, y: tf.Tensor, x: tf.Tensor) -> Any:
            return repl.run(lambda: repl.all_reduce([z, y, x][repl.replica_id]))

        results = [y.numpy() for y in call(*map(tf.constant, arrays))]
    assert all(result.tobytes() == want for result in results)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_many_16_bit_tensors_are_added_up_in_float32(op: str, dtype: str) -> None:
    """More ops of one name than ten, so that their names do not sort either."""
    narrow = tf.as_dtype(dtype).as_numpy_dtype
    repl = _make(4)
    rng = np.random.RandomState(0)
    columns = [
        [(rng.randn(32) * 10 ** rng.uniform(-1, 1, 32)).astype(narrow) for _ in "0123"]
        for _ in range(5)
    ]
    run = repl.build(
        lambda: repl.all_reduce(
            [helpers.opaque(column[repl.replica_id]) for column in columns], op
        )
    )
    for column, results in zip(columns, run(), strict=True):
        wide = _from_left(op, [array.astype(np.float32) for array in column])
        for result in results:
            assert result.numpy().tobytes() == wide.astype(narrow).tobytes()


@pytest.mark.parametrize("num_tensors", [1, 5])
def test_gradients_of_gathers_are_summed_in_order(num_tensors: int) -> None:
    arrays = [_arrays(4, spread=4) for _ in range(num_tensors)]
    repl = _make(4)

    def step() -> Any:
        xs = [helpers.opaque(tf.zeros([16])) for _ in range(num_tensors)]
        with tf.GradientTape() as tape:
            tape.watch(xs)
            joined = repl.all_gather(xs, axis=0)
        upstream = [helpers.opaque(own[repl.replica_id]) for own in arrays]
        return tape.gradient(joined, xs, output_gradients=upstream)

    for own, results in zip(arrays, repl.run(step), strict=True):
        want = _from_left("sum", own)
        for r, result in enumerate(results):
            assert result.numpy().tobytes() == want[16 * r : 16 * r + 16].tobytes()
