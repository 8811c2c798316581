# SPDX-License-Identifier: Apache-2.0
"""Programs of functions: variables that are read and written, and arguments."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from replicator import strategy
from tests.autodist.functions import PARTS, X, batches, descend, program

# --- Variables ------------------------------------------------------------------------


@program(
    [np.float32([1, 2, 3, 4, 5, 7, 9]), np.int32(2)],
    cases={name: name for name in ("sum", "scaled", "max", "count", "loop", "nested")},
)
def writes_in_control_flow(case: str) -> Any:
    v = tf.Variable(0, dtype=tf.int64) if case == "count" else tf.Variable(0.0)

    def write(total, largest, count):
        if case == "max":
            v.assign(largest)
        elif case == "count":
            v.assign_add(count)
        else:
            v.assign_add(total * 2.0 if case == "scaled" else total)

    def function(x, step):
        values = tf.reduce_sum(x), tf.reduce_max(x), tf.size(x, tf.int64)
        if case == "loop":
            for _ in tf.range(2):
                write(*values)
        elif step % 2 == 0:
            if case != "nested" or step < 3:
                write(*values)
        return values[0]

    return function, [v]


@program([X], [X], [X], cases={"branch": 1, "function": 2, "loop": 3})
def a_read_before_a_write(case: int) -> Any:
    v = tf.Variable(tf.zeros([128, 128]))

    def spend() -> tf.Tensor:
        spent = tf.matmul(v, tf.eye(128)) + v + v.read_value()
        v.assign(spent + 1.0)
        return tf.reduce_mean(spent + tf.matmul(v, tf.eye(128)))

    def step(x: tf.Tensor) -> tf.Tensor:
        if case == 1:
            return tf.cond(tf.reduce_sum(v) >= 0.0, spend, lambda: 0.0)
        if case == 2:
            return tf.function(spend)()
        turn = lambda k, _: (k + 1, spend())  # noqa: E731
        return tf.while_loop(lambda k, _: k < 1, turn, (0, 0.0))[1]

    return step, [v]


@program(*([np.arange(2.0 * n, dtype="f").reshape(n, 2)] for n in (6, 5)))
def an_argument_that_is_assigned() -> Any:
    last = tf.Variable(tf.zeros([1, 2]), shape=[None, 2], trainable=False)

    def remember(x: tf.Tensor) -> None:
        last.assign(x)

    return remember, [last]


@program([X[:3]])
def what_is_the_same_on_all_replicas() -> Any:
    w, n = tf.Variable([1.0, 2.0]), tf.Variable(0)

    def step(x: tf.Tensor) -> Any:
        n.assign_add(1)
        return w + 0.0, n + 0, tf.reduce_mean(x)

    return step, [n]


def _on_read(size: int, aggregation: str = "SUM") -> tf.Variable:
    """Returns a variable with a value per replica."""
    when = tf.VariableSynchronization.ON_READ
    how = {"synchronization": when, "aggregation": tf.VariableAggregation[aggregation]}
    return tf.Variable(tf.zeros([size]), trainable=False, **how)


@program(
    *([np.ones(n, "f")] for n in (3, 1)),
    cases={
        f"{part} by {how}": (part, how)
        for part in ("rows", "slice")
        for how in ("SUM", "MEAN")
    },
)
def parts_of_variables_with_values_per_replica(case: tuple[str, str]) -> Any:
    v = _on_read(3, case[1])

    def step(x: tf.Tensor) -> tf.Tensor:
        if case[0] == "rows":
            v.scatter_add(tf.IndexedSlices(x, tf.zeros_like(x, tf.int32)))
        else:
            v[0].assign(v[0] + tf.reduce_sum(x))
        return v.read_value()

    return step, [v]


@program(
    *([np.arange(n, dtype=np.int32) % 4] for n in (1, 2, 5)),
    cases={"examples": None, "a constant": [2]},
)
def counts_of(case: Any) -> Any:
    counts = _on_read(4)

    def count(places: tf.Tensor) -> tf.Tensor:
        indices = tf.constant(case) if case else places
        ones = tf.ones_like(indices, tf.float32)
        counts.scatter_add(tf.IndexedSlices(ones, indices))
        return tf.size(places)

    return count, [counts]


@program(
    *([X[:n, 0]] for n in (5, 4, 3)),
    cases={"rows": 1, "loss": 2, "not split": 3},
    is_eager=True,
)
def metrics_of_keras(case: int) -> Any:
    mean, total = keras.metrics.Mean(), keras.metrics.Sum()

    def step(x: tf.Tensor) -> Any:
        if case == 3:
            x = tf.map_fn(lambda one: 2.0 * one, x)
        mean.update_state(tf.reduce_mean(x) if case == 2 else x)
        total.update_state(x)
        return mean.result(), total.result()

    return step, [total.variables[0].value]


def _layers(ids: tf.Tensor, t: Any, w: Any, b: Any) -> tf.Tensor:
    return tf.gather(t, ids) @ w + b


def _in_a_loop(ids: tf.Tensor, t: Any, w: Any, b: Any) -> tf.Tensor:
    def turn(i: tf.Tensor, x: tf.Tensor) -> Any:
        return i + 1, tf.tanh(x @ w + b)

    return tf.while_loop(lambda i, x: i < 3, turn, [0, tf.gather(t, ids)])[1] @ w + b


def _in_a_branch(ids: tf.Tensor, t: Any, w: Any, b: Any) -> tf.Tensor:
    x = _layers(ids, t, w, b)
    return tf.cond(tf.reduce_sum(w) > 0, lambda: x * 2, lambda: x)


@program(
    *([np.int32(ids)] for ids in ([0, 1, 2, 3, 1], [2, 2])),
    cases={
        "loop": (_in_a_loop, "loss"),
        "branch": (_in_a_branch, "loss"),
        "table": (_layers, "loss"),
        "value": (_layers, "value"),
        "variables": (_layers, "variables"),
    },
    strategies=[PARTS, strategy.PS()],
)
def embeddings(case: Any) -> Any:
    t = tf.Variable(np.arange(12, dtype=np.float32).reshape(6, 2) / 10)
    own = [t, tf.Variable(tf.ones([2, 2]) * 0.3), tf.Variable(tf.zeros([2]))]
    keys = tf.lookup.KeyValueTensorInitializer([0, 1, 2, 3], [1, 3, 5, 5])
    table, optimizer = tf.lookup.StaticHashTable(keys, 0), keras.optimizers.SGD(0.1)
    optimizer.build(own)

    def step(ids: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            found = table.lookup(ids) if case[0] is _layers else ids
            loss = tf.reduce_mean(case[0](found, *own) ** 2)
        slopes = tape.gradient(loss, own)
        optimizer.apply_gradients(zip(slopes, own, strict=True))
        more = {"value": [own[2].read_value()], "variables": own}.get(case[1], [])
        return loss, *more

    return step, own


# --- Arguments ------------------------------------------------------------------------


@program([np.ones([12, 2], np.int64)], [np.arange(10).reshape(5, 2) % 4])
def a_sparse_lookup() -> Any:
    table = tf.Variable(np.arange(36, dtype=np.float32).reshape(9, 4) / 9)

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            sparse = tf.sparse.from_dense(ids + 1)  # none of which is 0
            rows = tf.nn.embedding_lookup_sparse(table, sparse, None)
            loss = tf.reduce_mean(rows**2)
        descend(tape, loss, table)
        return loss

    return step, [table]


def _sparse_arguments(n: int) -> list[Any]:
    y = X[:n] * (X[:n] > 0)
    ragged = tf.ragged.constant([[1.0, 2], [3]])
    return [tf.sparse.from_dense(y), ragged, X[:n]]


@program(*map(_sparse_arguments, (8, 5, 2)))
def sparse_and_ragged_arguments() -> Any:
    def step(x: tf.SparseTensor, ragged: tf.RaggedTensor, y: tf.Tensor) -> Any:
        rows = tf.sparse.sparse_dense_matmul(x, tf.ones([3, 1])) - y[:, :1]
        return rows, ragged.with_values(ragged.values * 2), tf.sparse.from_dense(y)

    return step, []


@program(*batches(5, 3, 1))
def what_python_computes() -> Any:
    def step(x: tf.Tensor) -> tf.Tensor:
        return tf.numpy_function(lambda rows: np.sort(rows, 0), [x], tf.float32)

    return step, []


@program([X[:3], 2.0], [2.0, X[:3]])
def arguments_in_places() -> Any:
    return lambda a, b: a - b, []


@program([X], [X], cases={"itself": 1, "in a branch": 2})
def an_iterator(case: int) -> Any:
    iterator = iter(tf.data.Dataset.from_tensor_slices(X).batch(2))

    def step(x: tf.Tensor) -> tf.Tensor:
        if case == 1:
            return tf.reduce_sum(next(iterator))
        pull = lambda: tf.reduce_sum(next(iterator))  # noqa: E731
        return tf.cond(tf.shape(x)[0] > 2, pull, lambda: 0.0)

    return step, []


@program([X])
def a_dataset() -> Any:
    data = tf.data.Dataset.from_tensor_slices(X).batch(4)

    def total(x):
        result = tf.reduce_sum(next(iter(data)))
        for rows in data:
            result += tf.reduce_sum(rows)
        return result + tf.reduce_mean(x)

    return total, []
