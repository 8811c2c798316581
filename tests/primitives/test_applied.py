# SPDX-License-Identifier: Apache-2.0
"""Steps that take several gradients, of a global batch that does not divide evenly.

A wrapped optimizer's update is that of one device with the whole batch. Only the
gradients that it applies are weighed by examples: any other is a value, that of the sum
of all replicas' losses, whether or not the step also updates variables.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator.primitives import applied
from tests import helpers
from tests.primitives.losses import (
    SIZES,
    Repl,
    W,
    X,
    contrasted,
    gathered,
    mean,
    one_device,
    taken,
    unknown,
    update,
    update_in_a_session,
)


def _sum(repl: Repl, x: Any) -> Any:
    return x if repl is None else repl.all_reduce(x)


def _weighed(repl: Repl, loss: Any) -> Any:
    return loss if repl is None else loss * tf.cast(repl.weight, loss.dtype)


def _energy(repl: Repl, w: Any, x: Any) -> Any:
    """One number per example, relative to all examples."""
    z = tf.tanh(x @ w)
    return tf.reduce_sum((z - mean(repl, tf.reduce_mean(z, 0))) ** 3, 1)


def _slope(repl: Repl, w: Any, x: Any) -> Any:
    """The gradient of all examples' energies, for each example."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(_energy(repl, w, x))
    return tape.gradient(total, x)


# --- Another gradient is a value ------------------------------------------------------


def _adversarial(repl: Repl, w: Any, x: Any) -> Any:
    moved = x + tf.stop_gradient(_slope(repl, w, x))
    return taken(lambda: tf.reduce_mean(_energy(repl, w, moved)), w)


def _adversarial_under_one_tape(repl: Repl, w: Any, x: Any) -> Any:
    def loss() -> Any:
        moved = x + tf.stop_gradient(_slope(repl, w, x))
        return tf.reduce_mean(_energy(repl, w, moved))

    return taken(loss, w)


def _adversarial_in_a_function(repl: Repl, w: Any, x: Any) -> Any:
    return tf.function(lambda x: _adversarial(repl, w, x))(x)


def _sampled(repl: Repl, w: Any, x: Any) -> Any:
    """An energy-based model, whose samples descend in a loop."""
    samples = tf.while_loop(
        lambda k, _: k < 3, lambda k, s: (k + 1, s - _slope(repl, w, s)), [0, x / 2]
    )[1]

    def loss() -> Any:
        return tf.reduce_mean(_energy(repl, w, x) - _energy(repl, w, samples))

    return taken(loss, w)


def _multiplied(repl: Repl, w: Any, x: Any) -> Any:
    """A network whose inputs are multiplied by a gradient, then squared."""
    slope = _slope(repl, w, x)
    return taken(lambda: tf.reduce_mean((slope * (x @ w)) ** 2), w)


def _invariant(repl: Repl, w: Any, x: Any) -> Any:
    """Invariant risk minimization: a penalty on a gradient with constant upstream."""
    replicas = 1 if repl is None else repl.num_replicas
    count = _sum(repl, tf.cast(tf.shape(x)[0], x.dtype))

    def loss() -> Any:
        with tf.GradientTape() as tape:
            scale = tf.constant(1.0, x.dtype)
            tape.watch(scale)
            squares = tf.reduce_sum((scale * (x @ w) - 1.0) ** 2)
            risk = _sum(repl, squares) / count / replicas
        return risk * replicas + _sum(repl, tape.gradient(risk, scale)) ** 2

    return taken(loss, w)


def _first_order(repl: Repl, w: Any, x: Any) -> Any:
    """First-order MAML: the inner step is by a gradient that was combined by hand."""
    fast = tf.convert_to_tensor(w)
    d = taken(lambda: _weighed(repl, gathered(repl, fast, x)), fast)
    fast -= tf.stop_gradient(_sum(repl, d))
    return taken(lambda: gathered(repl, fast, x + 0.3), fast)


def _curvature_taken_too(repl: Repl, w: Any, x: Any) -> Any:
    """The applied gradient is differentiated, for something that is not applied."""
    with tf.GradientTape() as outer:
        applied = taken(lambda: gathered(repl, w, x), w)
    outer.gradient(applied, w)
    return applied


# --- A gradient in two passes ---------------------------------------------------------


def _head(repl: Repl, w: Any, x: Any) -> Any:
    """The gradient of the loss for what the first layer computes."""
    hidden = tf.tanh(x @ w)
    with tf.GradientTape() as tape:
        tape.watch(hidden)
        loss = contrasted(repl, hidden)
    return tape.gradient(loss, hidden)


def _given_on(repl: Repl, w: Any, x: Any) -> Any:
    upstream = _head(repl, w, x) * 1.0
    with tf.GradientTape() as tape:
        hidden = tf.tanh(x @ w)
    return tape.gradient(hidden, w, output_gradients=upstream)


def _by_a_product(repl: Repl, w: Any, x: Any) -> Any:
    upstream = _head(repl, w, x)
    return taken(lambda: tf.reduce_sum(upstream * tf.tanh(x @ w)), w)


def _by_a_stopped_product(repl: Repl, w: Any, x: Any) -> Any:
    def loss() -> Any:
        return tf.reduce_sum(tf.stop_gradient(_head(repl, w, x)) * tf.tanh(x @ w))

    return taken(loss, w)


def _in_functions(repl: Repl, w: Any, x: Any) -> Any:
    first = tf.function(lambda: _head(repl, w, x))
    surrogate = tf.function(lambda d: tf.reduce_sum(d * tf.tanh(x @ w)))
    upstream = first()
    return taken(lambda: surrogate(upstream), w)


def _without_a_tape(repl: Repl, w: Any, x: Any) -> Any:
    hidden = tf.tanh(x @ w)
    return tf.transpose(x) @ (_head(repl, w, x) * (1.0 - hidden**2))


# --- Combined by hand -----------------------------------------------------------------


def _clipped_sum(repl: Repl, w: Any, x: Any) -> Any:
    d = taken(lambda: _weighed(repl, gathered(repl, w, x)), w)
    return tf.clip_by_norm(_sum(repl, d), 0.01)


def _clipped_mean(repl: Repl, w: Any, x: Any) -> Any:
    d = taken(lambda: gathered(repl, w, x), w)
    return tf.clip_by_norm(mean(repl, d), 0.01)


def _scattered_sum(repl: Repl, w: Any, x: Any) -> Any:
    d = taken(lambda: _weighed(repl, gathered(repl, w, x)), w)
    return d if repl is None else repl.all_gather(repl.reduce_scatter(d), axis=0)


def _sum_of_rows(repl: Repl, w: Any, x: Any) -> Any:
    def loss() -> Any:
        rows = tf.gather(w, tf.argmax(x, axis=1))
        return _weighed(repl, contrasted(repl, tf.tanh(x * rows)))

    return tf.convert_to_tensor(_sum(repl, taken(loss, w)))


GRADIENTS = [
    _adversarial,
    _adversarial_under_one_tape,
    _adversarial_in_a_function,
    _sampled,
    _multiplied,
    _invariant,
    _first_order,
    _curvature_taken_too,
    _given_on,
    _by_a_product,
    _by_a_stopped_product,
    _in_functions,
    _without_a_tape,
    _clipped_sum,
    _clipped_mean,
    _scattered_sum,
    _sum_of_rows,
]


@pytest.mark.battery(10)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("gradient_fn", GRADIENTS)
def test_the_update_is_that_of_one_device(gradient_fn: Any, size: int) -> None:
    found = update(gradient_fn, X[:size])
    np.testing.assert_allclose(found, one_device(gradient_fn, size), atol=1e-7)


@pytest.mark.parametrize("gradient_fn", [_adversarial, _by_a_product, _clipped_sum])
def test_with_sizes_that_are_unknown_when_the_step_is_built(gradient_fn: Any) -> None:
    found = update(gradient_fn, unknown(5))
    np.testing.assert_allclose(found, one_device(gradient_fn, 5), atol=1e-7)


def test_a_value_is_the_same_with_and_without_an_optimizer() -> None:
    repl = helpers.make(3)
    with repl.context():
        w = tf.Variable(W)
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(0.0))

    def step_fn(x: Any) -> Any:
        return _slope(repl, w, x)

    def updating_fn(x: Any) -> Any:
        slope = _slope(repl, w, x)
        d = taken(lambda: tf.reduce_mean(_energy(repl, w, x + slope)), w)
        optimizer.apply([d], [w])
        return slope

    want = _slope(None, tf.constant(W), tf.constant(X[:5]))
    for fn in (step_fn, updating_fn):
        got = repl.run(fn, X[:5], "global_batch")
        np.testing.assert_allclose(tf.concat(list(got), 0), want, atol=1e-12)


def _adversarial_of_v1(repl: Repl, w: Any, x: Any) -> Any:
    (slope,) = tf.gradients(tf.reduce_sum(_energy(repl, w, x)), x)
    moved = x + tf.stop_gradient(slope)
    return tf.gradients(tf.reduce_mean(_energy(repl, w, moved)), w)[0]


def _given_on_in_v1(repl: Repl, w: Any, x: Any) -> Any:
    hidden = tf.tanh(x @ w)
    upstream = tf.gradients(contrasted(repl, hidden), hidden)
    return tf.gradients(tf.tanh(x @ w), w, grad_ys=upstream)[0]


@pytest.mark.parametrize(
    ("gradient_fn", "with_tapes"),
    [(_adversarial_of_v1, _adversarial), (_given_on_in_v1, _given_on)],
)
def test_gradients_of_tensorflow_1(gradient_fn: Any, with_tapes: Any) -> None:
    """The same by tf.gradients, in a session."""
    found = update_in_a_session(gradient_fn, 5)
    np.testing.assert_allclose(found, one_device(with_tapes, 5), atol=1e-7)


@pytest.mark.parametrize("visited", [[1500, 60], [60, 1500], [60]])
def test_a_gradient_is_found_however_far_and_in_whatever_order(
    visited: list[int],
) -> None:
    with tf.Graph().as_default():
        x = tf.constant([1.0, 2.0])
        (gradient,) = tf.gradients(x * x, x)
        values = [gradient]
        for _ in range(1500):
            values.append(tf.identity(values[-1]))
        walk = applied._Walk(frozenset())
        for n in visited:
            assert set(walk._ends(values[n])) == {id(gradient)}
            assert not walk._ends(values[n] + x)
