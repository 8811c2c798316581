# SPDX-License-Identifier: Apache-2.0
"""Functions of whole batches that were once refused, or wrong, on replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicator import strategy
from tests.forms.programs import doors

IDS = [tf.TensorSpec([None], tf.int32)]
PARTS = {"strategy": strategy.PartitionedPS()}


def _slow(*cases: Any) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def _check(step: Any, make: Any, signature: Any, batches: Any, **options: Any) -> None:
    """Raises unless replicas return, and leave behind, what one device does."""
    expected, one = doors.one_device(step, make, signature)
    wanted = [tf.nest.map_structure(np.asarray, one(*batch)) for batch in batches]
    for num_replicas in (2, 3):
        variables, function = doors.engine(
            step, make, signature, num_replicas, **options
        )
        for batch, want in zip(batches, wanted, strict=True):
            actual = tf.nest.map_structure(np.asarray, function(*batch))
            tf.nest.map_structure(
                lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), actual, want
            )
        for a, b in zip(variables, expected, strict=True):
            if isinstance(b, tf.Variable):
                np.testing.assert_allclose(a.numpy(), b.numpy(), 1e-5, 1e-6)


def _sgd(slopes: Any, variables: Any) -> None:
    for slope, v in zip(slopes, variables, strict=True):
        v.assign_sub(0.1 * tf.convert_to_tensor(slope))


def test_a_function_that_is_compiled():
    def make() -> list[tf.Variable]:
        return [tf.Variable(tf.ones([4, 1]))]

    @tf.function(jit_compile=True, autograph=False)
    def forward(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x @ w)

    def step(variables: Any, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((forward(x, variables[0]) - y) ** 2)
        _sgd(tape.gradient(loss, variables), variables)
        return loss

    signature = [tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])]
    rng = np.random.default_rng(0)
    batches = [
        [tf.cast(rng.normal(size=[n, k]), tf.float32) for k in (4, 1)] for n in (8, 5)
    ]
    _check(step, make, signature, batches)


def test_a_sparse_lookup():
    def make() -> list[tf.Variable]:
        return [tf.Variable(np.arange(36, dtype=np.float32).reshape(9, 4) / 9)]

    def step(variables: Any, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            sparse = tf.sparse.from_dense(ids)
            rows = tf.nn.embedding_lookup_sparse(variables[0], sparse, None)
            loss = tf.reduce_mean(rows**2)
        _sgd(tape.gradient(loss, variables), variables)
        return loss

    ids = np.random.default_rng(0).integers(1, 9, [12, 2])
    signature = [tf.TensorSpec([None, 2], tf.int64)]
    _check(step, make, signature, [[tf.constant(ids)], [tf.constant(ids[:5])]])


def test_the_norm_of_sparse_gradients_sees_all_rows():
    def make() -> list[tf.Variable]:
        return [tf.Variable(tf.ones([6, 3]))]

    def step(variables: Any, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.gather(variables[0], ids) ** 2)
        slopes, norm = tf.clip_by_global_norm(tape.gradient(loss, variables), 0.05)
        _sgd(slopes, variables)
        return norm

    _check(step, make, IDS, [[tf.constant([1, 1, 1, 2])], [tf.constant([0, 5, 5])]])


@pytest.mark.parametrize(
    "what", ["a loop", *_slow("a branch", "a table", "the variable")]
)
@pytest.mark.parametrize("is_in_parts", [True, *_slow(False)])
def test_variables_in_parts(what, is_in_parts):
    def make() -> list[Any]:
        t = tf.Variable(np.arange(12, dtype=np.float32).reshape(6, 2) / 10)
        w, b = tf.Variable(tf.ones([2, 2]) * 0.3), tf.Variable(tf.zeros([2]))
        keys = tf.lookup.KeyValueTensorInitializer([0, 1, 2, 3], [1, 3, 5, 5])
        table = tf.lookup.StaticHashTable(keys, 0)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([t, w, b])
        return [t, w, b, table, optimizer]

    def step(made: Any, ids: tf.Tensor) -> Any:
        t, w, b, table, optimizer = made
        with tf.GradientTape() as tape:
            x = tf.gather(t, table.lookup(ids) if what == "a table" else ids)
            if what == "a loop":

                def turn(i, x):
                    return (i + 1, tf.tanh(x @ w + b))

                x = tf.while_loop(lambda i, x: i < 3, turn, [0, x])[1]
            x = x @ w + b
            if what == "a branch":
                x = tf.cond(tf.reduce_sum(w) > 0, lambda: x * 2, lambda: x)
            loss = tf.reduce_mean(x**2)
        own = [t, w, b]
        optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
        return (loss, b.read_value()) if what == "the variable" else loss

    _check(
        *(step, make, IDS, [[tf.constant([0, 1, 2, 3, 1])], [tf.constant([2, 2])]]),
        **(PARTS if is_in_parts else {}),
    )
