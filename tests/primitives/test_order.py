# SPDX-License-Identifier: Apache-2.0
"""Reductions run in replica order: the bits of NumPy's sum from left to right.

TensorFlow's graph optimizer (Grappler) reorders sums where it may: operands by name,
constants together, equal operands into a multiple. Each of these is a case. And its
AddN starts, at run time, with an operand whose buffer it may reuse.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator.primitives import all_reduce
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


@pytest.mark.battery(5)
@pytest.mark.parametrize("algorithm", ["hub", "shuffled"])
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
@pytest.mark.parametrize("operands", OPERANDS, ids=lambda f: f.__name__)
def test_bits_of_numpy_whatever_the_optimizer_may_fold(
    operands: Operands, op: str, algorithm: str
) -> None:
    arrays = _arrays(8, spread=2)
    repl = _make(8, algorithm)
    _assert_bits(repl, operands(repl, arrays), op, _from_left(op, arrays))


def test_the_order_of_the_arrays_shows() -> None:
    """Otherwise this file would prove nothing."""
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
    """There, Grappler's 2 * x for x + x hangs, or gives an empty tensor."""
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
            with helpers.session() as session:
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
    """More than ten ops of one name, so that their names do not sort either."""
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
        upstream = [helpers.opaque(column[repl.replica_id]) for column in arrays]
        return tape.gradient(joined, xs, output_gradients=upstream)

    for own, results in zip(arrays, repl.run(step), strict=True):
        want = _from_left("sum", own)
        for r, result in enumerate(results):
            assert result.numpy().tobytes() == want[16 * r : 16 * r + 16].tobytes()


# --- The law: the documented order, whatever buffers are reusable ---------------------

VALUES = list(itertools.permutations([1e8, -1e8, 1.0]))
ALGORITHMS = ["hub", "shuffled", "tree", "ring"]
SIZES = [40, 100, 70, 3, 37, 16]  # of the tensors; the first ones can be cut


def _columns(num_replicas: int) -> list[list[np.ndarray]]:
    """Arrays whose sum shows its order: by permutation, and by replica."""
    return [
        [np.full(size, values[r % 3], np.float32) for r in range(num_replicas)]
        for values, size in zip(VALUES, SIZES, strict=True)
    ]


def _documented(algorithm: str, column: Sequence[np.ndarray]) -> np.ndarray:
    """Adds up one array per replica in the algorithm's documented order."""
    count = len(column)
    if algorithm == "tree":
        if count == 1:
            return column[0]
        middle = 1 << (count - 1).bit_length() - 1
        return _documented("tree", column[:middle]) + _documented(
            "tree", column[middle:]
        )
    if algorithm != "ring":
        return functools.reduce(np.add, column)
    width = -(-column[0].size // (count * 16)) * 16  # slices are cut at 64 bytes
    starts = range(0, column[0].size, width)
    return np.concatenate(
        [
            functools.reduce(
                np.add, [column[(k + n) % count][at : at + width] for n in range(count)]
            )
            for k, at in enumerate(starts)
        ]
    )


def _packed(algorithm: str, columns: Any) -> list[np.ndarray]:
    """Adds up tensors that share a bucket, one array per replica and tensor."""
    packs = [np.concatenate(arrays) for arrays in zip(*columns, strict=True)]
    cuts = np.cumsum([column[0].size for column in columns])[:-1]
    return list(np.split(_documented(algorithm, packs), cuts))


def _mixed(column: Sequence[tf.Tensor], r: int, k: int) -> tf.Tensor:
    """Computed on some replicas only, so that its buffer can be reused there."""
    return column[r] + helpers.opaque(0.0) if (r + k) % 3 == 0 else column[r]


@pytest.mark.battery(10)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_replicas", range(2, 9))
def test_the_order_is_the_documented_one(num_replicas: int, algorithm: str) -> None:
    """For tensors in one bucket, and for one alone, which may be cut into slices."""
    repl = helpers.make(num_replicas, algorithm=algorithm, fusion=True)
    columns = _columns(num_replicas)
    captured = [list(map(tf.constant, column)) for column in columns]

    def step(fed: Sequence[tf.Tensor]) -> Any:
        r = repl.replica_id
        mixed = [_mixed(column, r, k) for k, column in enumerate(captured)]
        half_fed = [x if (r + k) % 3 else captured[k][r] for k, x in enumerate(fed)]
        return [
            repl.all_reduce([column[r] for column in captured]),
            repl.all_reduce(mixed),
            repl.all_reduce(half_fed),
            [repl.all_reduce(x) for x in mixed],
            [repl.all_reduce(x) for x in half_fed[:2]],
        ]

    def input_fn(ctx: replicator.InputContext) -> tf.data.Dataset:
        operands = tuple(column[ctx.replica_id] for column in columns)
        return helpers.untuned(tf.data.Dataset.from_tensors(operands).repeat())

    together = [x.tobytes() for x in _packed(algorithm, columns)]
    alone = [_documented(algorithm, column).tobytes() for column in columns]
    run = repl.build(step, input_fn)
    for _ in range(20):
        want = [*together * 3, *alone, *alone[:2]]
        for received, bits in zip(sum(run(), []), want, strict=True):
            assert {x.numpy().tobytes() for x in received} == {bits}


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("place", "algorithm"),
    [("session", "hub"), ("due", "hub"), *(("while", name) for name in ALGORITHMS)],
)
@pytest.mark.parametrize("num_replicas", [3, 5])
def test_the_order_holds_everywhere(
    num_replicas: int, place: str, algorithm: str
) -> None:
    """In a session, in loops, and where nothing is reduced in some steps."""
    columns = _columns(num_replicas)
    want = [_documented(algorithm, column).tobytes() for column in columns]
    repl = helpers.make(num_replicas, algorithm=algorithm, fusion=False)

    def make_step() -> Callable[[], Any]:
        def step() -> Any:
            own = [
                _mixed([tf.constant(x) for x in column], repl.replica_id, k)
                for k, column in enumerate(columns)
            ]
            if place == "due":
                return all_reduce.reduce_dense(own, "sum", when=helpers.opaque(True))
            if place == "session":
                return repl.all_reduce(own)
            zeros = [tf.zeros_like(x) for x in own]
            return tf.while_loop(
                lambda n, *_: n < helpers.opaque(2),
                lambda n, *_: (n + 1, *repl.all_reduce(own)),
                (0, *zeros),
            )[1:]

        return step

    mode = "session" if place == "session" else "eager"
    for results, bits in zip(
        helpers.run(mode, repl, make_step, steps=5), want, strict=True
    ):
        assert {np.asarray(x).tobytes() for x in results} == {bits}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_sums_are_not_mixed_with_those_around_them(
    num_replicas: int, algorithm: str
) -> None:
    """Grappler joins a + (b + c), and sorts the operands by name."""
    repl = _make(num_replicas, algorithm)
    one, two, three = (_arrays(num_replicas), _arrays(num_replicas + 8), _arrays(9))
    addend = three[0]

    def step() -> list[tf.Tensor]:
        r = repl.replica_id
        sums = []
        for _ in range(num_replicas):  # each device is a hub once
            operand = helpers.opaque(one[r]) + helpers.opaque(two[r])
            sums.append(helpers.opaque(addend) + repl.all_reduce(operand))
        return sums

    column = [a + b for a, b in zip(one, two, strict=False)]
    want = (addend + _documented(algorithm, column)).tobytes()
    for results in repl.run(step):
        assert [y.numpy().tobytes() == want for y in results] == [True] * num_replicas


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_what_replicas_differ_in_is_added_up_in_order_when_read_outside(
    op: str,
) -> None:
    columns = _columns(3)
    repl = _make(3)
    with repl.context():
        variables = [
            tf.Variable(
                column[0],
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=getattr(tf.VariableAggregation, op.upper()),
            )
            for column in columns
        ]

    def step() -> None:
        for column, variable in zip(columns, variables, strict=True):
            variable.assign(tf.stack([tf.constant(x) for x in column])[repl.replica_id])

    repl.run(step)
    read = tf.function(lambda: [v.read_value() for v in variables])
    for column, *values in zip(columns, variables, read(), strict=True):
        want = _from_left(op, column).tobytes()
        assert [x.numpy().tobytes() for x in values] == [want] * 2


TRAINING = """
import hashlib
import sys

import numpy as np
import tensorflow as tf

import replicator

repl = replicator.Replicator([f"CPU:{r}" for r in range(3)], algorithm=sys.argv[1])
rng = np.random.RandomState(0)
inputs = rng.randn(12, 16).astype(np.float32)
tf.keras.utils.set_random_seed(1)
with repl.context():
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(32, activation="tanh"), tf.keras.layers.Dense(1)]
    )
    optimizer = repl.wrap_optimizer(
        tf.keras.optimizers.Nadam(0.01), accumulation_steps=3
    )
    model.build([None, 16])
    optimizer.build(model.trainable_variables)
for k, variable in enumerate(model.variables):
    variable.assign(np.random.RandomState(k).randn(*variable.shape))


def step(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return repl.all_reduce(loss, "mean")


dataset = tf.data.Dataset.from_tensor_slices(inputs).batch(4).repeat()
run = repl.build(step, lambda: dataset)
losses = [run()[0].numpy() for _ in range(12)]
print(hashlib.sha256(np.stack(losses).tobytes()).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["hub", "shuffled"])
def test_training_is_the_same_in_each_process(algorithm: str) -> None:
    command = [sys.executable, "-c", TRAINING, algorithm]
    prints = {
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    }
    assert len(prints) == 1
