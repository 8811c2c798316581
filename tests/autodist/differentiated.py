# SPDX-License-Identifier: Apache-2.0
"""Programs of functions: what trains, and gradients however they are taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import sonnet as snt
import tensorflow as tf
import tf_keras

from tests.autodist.functions import PARTS, X, batches, descend, program
from tests.autodist.programs import SIZES, examples

Y, IDS = examples(24, 2)[:12], np.random.default_rng(0).permutation(12)


# --- Training -------------------------------------------------------------------------


def _by_hand(variables: Any) -> Any:
    def apply(slopes: Any) -> None:
        for v, slope in zip(variables, slopes, strict=True):
            v.assign_sub(0.1 * tf.convert_to_tensor(slope))

    return apply


def _by(optimizer: Any, variables: Any) -> Any:
    return lambda slopes: optimizer.apply_gradients(zip(slopes, variables, strict=True))


def _by_sonnet(variables: Any) -> Any:
    momentum = snt.optimizers.Momentum(0.1, 0.9)
    return lambda slopes: momentum.apply(
        [tf.convert_to_tensor(slope) for slope in slopes], variables
    )


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "by hand": _by_hand,
    "v1": lambda own: _by(tf.compat.v1.train.AdagradOptimizer(0.1), own),
    "keras": lambda own: _by(keras.optimizers.Adam(0.1, clipnorm=0.5), own),
    "sonnet": _by_sonnet,
}


@program(
    *([X[:n], Y[:n], IDS[:n], np.float32(0.5 + n % 2)] for n in SIZES),
    cases=OPTIMIZERS,
    strategies=["sharded", "mirrored"],
)
def trained(case: Any) -> Any:
    w, b = tf.Variable(examples(3, 2)), tf.Variable([0.5, -0.5])
    table = tf.Variable(examples(12, 2))
    variables = [w, b, table]
    apply = case(variables)

    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.matmul(x, w) + b)

    def step(x, y, ids, scale, turns=2):
        with tf.GradientTape() as tape:
            output = inner(x) + tf.gather(table, ids)
            for _ in range(turns):
                output = output * b if scale > 1 else output + b
            k = tf.constant(0)
            while k < 2:
                output += 0.1 * tf.matmul(x, w)
                k += 1
            loss = tf.reduce_mean((output - y) ** 2) * scale
        apply(tape.gradient(loss, variables))
        return {"loss": loss, "made": (output, 0), "rows": tf.reduce_sum(output, 1)}

    return step, variables


@program(*batches(5, 4, 5, 3, 2, 5))
def gradients_that_keras_accumulates() -> Any:
    w = tf.Variable(np.ones([3, 1], np.float32))
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    optimizer.build([w])

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    return step, [w]


@program(*([np.arange(3 * n).reshape(n, 3) % 5] for n in (6, 5, 1)), strategies=[PARTS])
def layers_of_tf_keras() -> Any:
    seeds = [tf_keras.initializers.RandomUniform(seed=k) for k in range(2)]
    embedding = tf_keras.layers.Embedding(7, 4, seeds[0])
    dense = tf_keras.layers.Dense(2, kernel_initializer=seeds[1])
    layers = [embedding, tf_keras.layers.GlobalAveragePooling1D(), dense]
    model = tf_keras.Sequential(layers)
    model.build([None, 3])
    optimizer = tf_keras.optimizers.SGD(0.5, momentum=0.9)

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids) - 1.0) ** 2)
        own = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
        return loss

    return step, model.weights


@program(*batches(7, 5, 2))
def variables_made_at_the_first_call() -> Any:
    made: list[Any] = []

    def step(x: tf.Tensor) -> tf.Tensor:
        if not made:
            made.append(tf.Variable(tf.ones([3, 2]) * 0.5, name="w"))
            adam = keras.optimizers.Adam(0.1)
            adam.build(made)
            step.adam = adam
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ made[0]) ** 2)
        adam = step.adam
        adam.apply_gradients([(tape.gradient(loss, made[0]), made[0])])
        return loss

    return step, made


@program(
    *([X[:n], Y[:n]] for n in (7, 4, 1)),
    cases={
        "as they are": lambda x, y: (x, y),
        "less their mean": lambda x, y: (
            *(x - tf.reduce_mean(x, 0), y / (1 + tf.math.reduce_std(y))),
        ),
        "reversed": lambda x, y: (x, y[::-1]),
        "summed up": lambda x, y: (tf.cumsum(x), y),
        "some": lambda x, y: [tf.boolean_mask(z, x[:, 0] > 0) for z in (x, y)],
    },
)
def a_function_that_trains(case: Any) -> Any:
    w = tf.Variable(examples(3, 2))

    @tf.function
    def train(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w - y) ** 2)
        descend(tape, loss, w)

    return lambda x, y: train(*case(x, y)), [w]


@program(*batches(8, 5))
def a_function_that_is_compiled() -> Any:
    w = tf.Variable(tf.ones([3, 1]))
    forward = tf.function(lambda x: tf.tanh(x @ w), jit_compile=True, autograph=False)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((forward(x) - 1.0) ** 2)
        descend(tape, loss, w)
        return loss

    return step, [w]


# --- Gradients ------------------------------------------------------------------------


def _twice(tape: Any, loss: Any, v: Any, w: Any) -> Any:
    return tape.gradient(loss, v), tape.gradient(loss, w)


def _again(tape: Any, loss: Any, v: Any, w: Any) -> Any:
    tape.gradient(loss, v)
    return _twice(tape, loss, v, w)


def _waiting(tape: Any, loss: Any, v: Any, w: Any) -> Any:
    first = tape.gradient(loss, v)
    with tf.control_dependencies([first]):
        return first, tape.gradient(loss, w)


def _given(tape: Any, loss: Any, v: Any, w: Any) -> Any:
    two = tf.constant(2.0)
    first = tape.gradient(loss, v, output_gradients=two)
    return first, tape.gradient(loss, w, output_gradients=two)


def _of_two(tape: Any, loss: Any, v: Any, w: Any) -> Any:
    with tape:
        other = 2.0 * loss
    return tape.gradient(loss, v), tape.gradient([loss, other], w)


def _by_gradients(tape: Any, loss: Any, v: Any, w: Any) -> Any:
    (first,), (second,) = tf.gradients(loss, v), tf.gradients(loss, w)
    return first, tape.gradient(loss, w) - second + second


_TAKES = (_twice, _again, _waiting, _given, _of_two, _by_gradients)


@program(*batches(3), cases={take.__name__[1:]: take for take in _TAKES})
def gradients_of_one_loss(case: Any) -> Any:
    v, w = tf.Variable([[0.3], [0.7], [0.1]]), tf.Variable([0.5, 0.2])

    def step(x: tf.Tensor) -> None:
        with tf.GradientTape(persistent=True) as tape:
            rows = tf.tanh(tf.matmul(x, v)) * tf.reduce_sum(w**2) + w[0] * v[0, 0]
            loss = tf.reduce_mean(rows)
        first, second = case(tape, loss, v, w)
        v.assign_sub(first)
        w.assign_sub(second)

    return step, [v, w]


@program(*([np.arange(2, 2 + n, dtype="f")] for n in (4, 1, 3, 2, 1, 4)))
def batches_smaller_than_replicas() -> Any:
    """The logarithm of a dummy example would be NaN, and must not count."""
    v = tf.Variable(1.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.math.log(x * v) ** 2)
        descend(tape, loss, v)
        return loss

    return step, [v]


@program(*batches(6, 5), strategies=["sharded", PARTS])
def gradients_by_examples() -> Any:
    w, optimizer = tf.Variable(examples(3, 2)), keras.optimizers.Adam(0.1)
    optimizer.build([w])

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            ordered = tf.sort(tf.reduce_sum(tf.tanh(x @ w), 1))
            loss = tf.reduce_mean(ordered**2 * x[:, 0])
        by_w, by_x = tape.gradient(loss, [w, x])
        optimizer.apply_gradients([(by_w, w)])
        return loss, by_x, tf.sort(x[:, 0])[1]

    return step, [w]


@program([])
def gradients_where_nothing_is_split() -> Any:
    w = tf.Variable([1.0, 2.0])

    def step() -> Any:
        one = tf.ones([])
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                tape.watch(one)
                loss = tf.reduce_sum((one * w) ** 3)
            by_w, by_one = tape.gradient(loss, [w, one])
            squares = tf.reduce_sum(by_w**2)
        return by_w, by_one, outer.gradient(squares, w)

    return step, [w]


@program(*batches(7, 4))
def a_gradient_of_a_gradient_from_a_given_one() -> Any:
    w = tf.Variable(examples(3, 2))

    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
            gradient = tape.gradient(loss, w)
        return outer.gradient(gradient, w, output_gradients=tf.ones([3, 2]))

    return step, [w]
