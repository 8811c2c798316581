# SPDX-License-Identifier: Apache-2.0
"""Primitives with many types, shapes, groups and options, and with derivatives.

What each computes is in tests/conformance; here, all ways compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import replicator
from replicator import Replicator
from tests.programs.program import ASKS, NO_SESSION, ONE_PROCESS, SHAPES, Step, program

_DTYPES = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
)
_OPS = {
    "float32": ("sum", "mean", "prod", "min", "max", "argmin", "argmax"),
    "int32": ("sum", "prod", "min", "max", "argmax", "bitwise_and", "bitwise_xor"),
    "bool": ("logical_and", "logical_or", "min", "max"),
    "bfloat16": ("sum", "mean", "max"),
    "complex64": ("sum", "mean"),
    "int8": ("sum", "max"),
}


def _own(x: tf.Tensor, shape: Any = (2, 3), dtype: str = "float32") -> tf.Tensor:
    """Returns integers of 0 to 8 that differ between replicas."""
    seed = tf.cast([x, 0.0], tf.int32)
    return tf.cast(tf.random.stateless_uniform(shape, seed, 0, 9, tf.int32), dtype)


def _ragged(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor with one row less than x."""
    count = tf.cast(x, tf.int32) - 1
    rows = tf.random.stateless_uniform([count, 2], [count, 1])
    return tf.compat.v1.placeholder_with_default(rows, [None, 2])


@program()
def reductions(repl: Replicator) -> Step:
    return lambda x: {
        dtype: [repl.all_reduce(_own(x, dtype=dtype), op) for op in ops]
        for dtype, ops in _OPS.items()
    }


@program()
def many_tensors(repl: Replicator) -> Step:
    shapes = [(), (3,), (2, 3), (1000, 40), (5, 3), (0, 3), (1000, 41)]
    return lambda x: repl.all_reduce([_own(x, shape) for shape in shapes], "mean")


@program()
def weighted_mean(repl: Replicator) -> Step:
    return lambda x: repl.all_reduce(_own(x), "mean", weight=x % 3)


@program()
def sparse_mean(repl: Replicator) -> Step:
    def step(x: tf.Tensor) -> tf.Tensor:
        rows = tf.stack([tf.cast(x, tf.int32), 5])
        slices = tf.IndexedSlices(_own(x), rows, tf.constant([9, 3]))
        return tf.convert_to_tensor(repl.all_reduce(slices, "mean"))

    return step


@program()
def every_dtype(repl: Replicator) -> Step:
    return lambda x: [repl.all_gather(_own(x, (3,), dtype)) for dtype in _DTYPES]


@program()
def gathers(repl: Replicator) -> Step:
    return lambda x: [repl.all_gather(_own(x)), repl.all_gather(_ragged(x), axis=0)]


@program(None, ASKS)
def gathers_of_known_sizes(repl: Replicator) -> Step:
    return lambda x: repl.all_gather(_own(x, (repl.replica_id, 2)), axis=0)


def _sizes(ctx: replicator.InputContext) -> tf.data.Dataset:
    starts = tf.data.Dataset.from_tensor_slices([3, 1, 40, 0, 9])
    return starts.map(lambda n: (tf.range(n, n + 50), ctx.replica_id))


@program(
    lambda count: [[n for r in range(count) for n in range(9, 18 + r)]] * count,
    SHAPES,
    inputs=_sizes,
    steps=5,
)
def sizes_that_change_with_each_step(repl: Replicator) -> Step:
    def step(batch: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        numbers, r = batch
        return repl.all_gather(numbers[: numbers[0] + r], axis=0)

    return step


@program(None, ASKS)
def all_to_all(repl: Replicator) -> Step:
    count = repl.num_replicas

    def step(x: tf.Tensor) -> Any:
        splits = [(repl.replica_id + n) % 3 for n in range(count)]
        return [
            repl.all_to_all(_own(x, (count, 3)), 0, 1),
            repl.all_to_all(_own(x, (sum(splits), 2)), 0, 0, splits=splits),
        ]

    return step


@program()
def rooted(repl: Replicator) -> Step:
    """What only a root receives is zeros elsewhere."""
    count = repl.num_replicas

    def step(x: tf.Tensor) -> Any:
        y = _own(x)
        received = [repl.reduce(y, root=count - 1), repl.gather(y, axis=0)]
        return [
            repl.broadcast(y, root=count - 1),
            repl.scatter(_own(x, (count, 2)), root=count // 2),
            *(tf.zeros([2, 3]) if z is None else z for z in received),
        ]

    return step


@program()
def moved(repl: Replicator) -> Step:
    count = repl.num_replicas
    pairs = [(r, (2 * r + 1) % count) for r in range(count // 2)]

    def step(x: tf.Tensor) -> Any:
        rows = _own(x, (2 * count, 2))
        parts = repl.reduce_scatter(rows, "mean"), repl.permute(rows, pairs)
        repl.barrier()
        return [*parts, repl.shift(rows, 1), repl.shift(rows, -1)]

    return step


@program(None, ASKS)
def messages(repl: Replicator) -> Step:
    count = repl.num_replicas

    def step(x: tf.Tensor) -> tf.Tensor:
        if count == 1:
            return _own(x)
        there, back = (repl.replica_id + 1) % count, (repl.replica_id - 1) % count
        repl.send(_own(x), destination=there, tag=5)
        return repl.recv(tf.TensorSpec([2, 3]), source=back, tag=5)

    return step


@program(None, ASKS, replicas=(4,))
def groups(repl: Replicator) -> Step:
    across, within = repl.groups([[0, 2], [1, 3]]), repl.groups([[0, 1], [2, 3]])
    ends = repl.group([0, 3])

    def step(x: tf.Tensor) -> Any:
        y = _own(x)
        results = [repl.all_reduce(y, group=across), repl.all_gather(y, group=within)]
        if repl.replica_id in ends:
            y = repl.all_reduce(y, "mean", group=ends)
        return [*results, y]

    return step


@program()
def named_algorithms(repl: Replicator) -> Step:
    names = ("hub", "shuffled", "tree", "ring")
    return lambda x: [repl.all_reduce(_own(x), "max", algorithm=name) for name in names]


@program()
def gradients(repl: Replicator) -> Step:
    count = repl.num_replicas

    def step(x: tf.Tensor) -> Any:
        a, b = _own(x, (2 * count, 3)), _own(x, (2 * count,))
        with tf.GradientTape() as tape:
            tape.watch([a, b])
            parts = (
                repl.all_reduce(a * a, "mean"),
                repl.all_gather(tf.sin(b)),
                repl.all_reduce(a, "max"),
                repl.all_reduce(a / 3.0, "prod"),
                repl.all_reduce(a, "argmin").value,
                repl.reduce_scatter(a * a, axis=0),
                repl.reduce_scatter(a, "argmax").value,
                repl.all_to_all(a * b[:, None], 0, 1),
                repl.broadcast(a * 3, root=count - 1),
                tf.map_fn(lambda row: repl.broadcast(row**2), a),
            )
            loss = tf.add_n([tf.reduce_sum(x * part**2) for part in parts])
        return tape.gradient(loss, [a, b])

    return step


@program()
def gradients_of_uneven_slices(repl: Replicator) -> Step:
    count = repl.num_replicas

    def step(x: tf.Tensor) -> Any:
        rows = _own(x, (2 * count - 1, 4))
        splits = tf.constant([2] * (count - 1) + [1])
        with tf.GradientTape() as tape:
            tape.watch(rows)
            parts = (
                repl.reduce_scatter(rows),
                repl.all_to_all(rows, 0, 0, splits=splits),
                repl.broadcast(rows, root=count - 1),
            )
            loss = tf.add_n([tf.reduce_sum(part**2) for part in parts])
        sums = [tf.reduce_sum(part) for part in parts]
        sums.append(tf.reduce_sum(repl.scatter(rows, root=count // 2, axis=0)))
        return tape.gradient(loss, rows), repl.all_gather(sums)

    return step


def _second_gradient(x: tf.Tensor, call: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = call(x) ** 2
        d = inner.gradient(y, x) ** 2
    return outer.gradient(d, x)


def _places(x: tf.Tensor, call: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    inside = lambda x: tf.cond(x > 0.0, lambda: call(x), lambda: x)  # noqa: E731
    mapped = lambda x: tf.map_fn(call, tf.stack([x, 2.0 * x]))[1]  # noqa: E731
    return [_second_gradient(x, place) for place in (call, inside, mapped)]


@program(None, ONE_PROCESS)
def second_gradients_of_products(repl: Replicator) -> Step:
    """Each replica has another share; in control flow too."""
    return lambda x: _places(0.1 * x, lambda y: repl.all_reduce(y, "prod"))


@program(None, ONE_PROCESS)
def second_gradients_of_broadcasts(repl: Replicator) -> Step:
    root = repl.num_replicas - 1
    return lambda x: _places(0.1 * x, lambda y: y * repl.broadcast(y * y, root=root))


@program(None, ASKS, replicas=(4,))
def gradients_of_messages(repl: Replicator) -> Step:
    def step(x: tf.Tensor) -> tf.Tensor:
        y = _own(x)
        with tf.GradientTape() as tape:
            tape.watch(y)
            if repl.replica_id == 0:
                repl.send(y * y, destination=3)
                loss = repl.linked(0.0)
            elif repl.replica_id == 3:
                loss = tf.reduce_sum(y * repl.recv(y, source=0))
            else:
                loss = tf.reduce_sum(y)
        return tape.gradient(loss, y)

    return step


@program(None, NO_SESSION, ASKS)
def objects(repl: Replicator) -> Step:
    def step(x: tf.Tensor) -> tf.Tensor:
        sizes = repl.all_gather_object(repl.replica_id + 1)
        own_facts = {"size": np.int64(repl.replica_id), "rest": (None, b"\0", {1.5})}
        root = repl.broadcast_object(own_facts, root=repl.num_replicas - 1)
        assert root["rest"] == (None, b"\0", {1.5})
        return tf.zeros([sum(sizes), root["size"]])

    return step


@program()
def factors(repl: Replicator) -> Step:
    """Products whose factors are sent, with any number of rows, and sums of rows."""

    def step(x: tf.Tensor) -> Any:
        products, sums = [], []
        for known in (3, None):
            size = 3 if known else 2 + tf.cast(x, tf.int32)
            a, b = _own(x, (size, 400)), _own(x, (size, 500)) * 0.5
            a = tf.compat.v1.placeholder_with_default(a, [known, 400])
            products.append(tf.matmul(a, b, transpose_a=True))
            sums.append(tf.reduce_sum(b, 0))
        return repl.all_reduce([*products, *sums], "mean")

    return step
