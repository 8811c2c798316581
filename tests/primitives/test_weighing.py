# SPDX-License-Identifier: Apache-2.0
"""Gradients through communication, of a global batch that does not divide evenly.

A wrapped optimizer's update is that of one device with the whole batch, whatever the
forward pass communicates: each replica's loss is weighted by its examples, in the
gradients of other replicas, too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

SIZES = [6, 5, 2]  # on three replicas: evenly, unevenly, and one without examples
X = np.random.default_rng(1).normal(size=[6, 2])
W = np.array([[0.5, -0.3], [0.2, 0.7]])


def _gathered(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    hidden = tf.tanh(x @ w)
    every = hidden if repl is None else repl.all_gather(hidden, axis=0)
    return tf.reduce_mean(tf.reduce_logsumexp(hidden @ tf.transpose(every), axis=1))


def _mean(repl: replicator.Replicator | None, y: Any) -> Any:
    mean = tf.reduce_mean(y, axis=0)
    return mean if repl is None else repl.all_reduce(mean, "mean", repl.weight)


def _normalized(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    y = x @ w
    y -= _mean(repl, y)
    y *= tf.math.rsqrt(_mean(repl, y**2) + 0.1)
    return tf.reduce_mean(y * x**2)


def _whole(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    return _mean(repl, tf.tanh(x @ w)[:, 0])


def _looped(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    def body(k: Any, y: Any) -> Any:
        return k + 1, tf.tanh(y @ w) - _mean(repl, y)

    y = tf.while_loop(lambda k, _: k < 3, body, [0, x])[1]
    return tf.reduce_mean(y * x**2)


def _penalized(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    """The norm of the gradient of all examples' result, as a critic's penalty."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(x @ w)
        y -= _mean(repl, y**2)
        total = tf.reduce_sum(y * x)
    return tf.reduce_mean(tape.gradient(total, x) ** 2)


def _from_root(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    centre = tf.reduce_sum(w**2)
    if repl is not None:
        centre = repl.broadcast(centre, root=0)
    return tf.reduce_mean((x @ w - centre) ** 2)


def _centred(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    """A layer that comes with its own gradient, which sums over the replicas."""

    def total(z: Any) -> Any:
        z = tf.reduce_sum(z, axis=0)
        return z if repl is None else repl.all_reduce(z)

    @tf.custom_gradient
    def centre(z: Any) -> Any:
        count = total(tf.ones_like(z))
        return z - total(z) / count, lambda d: d - total(d) / count

    return tf.reduce_mean(centre(tf.tanh(x @ w)) ** 3)


def _centred_by_means(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    centre = tf.custom_gradient(lambda z: (z - _mean(repl, z), centred))

    def centred(d: Any) -> Any:
        return d - _mean(repl, d)

    return tf.reduce_mean(centre(tf.tanh(x @ w)) ** 3)


def _centred_in_a_function(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    return tf.function(lambda: _centred(repl, w, x))()


def _centred_in_a_loop(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    @tf.custom_gradient
    def centre(z: Any) -> Any:
        return z - _mean(repl, z), lambda d: d - _mean(repl, d)

    def body(k: Any, y: Any) -> Any:
        return k + 1, centre(tf.tanh(y @ w))

    y = tf.while_loop(lambda k, _: k < 3, body, [0, x])[1]
    return tf.reduce_mean(y * x**2)


def _gathered_back(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    """Every example's gradient is the mean of all, sent beside a value."""

    @tf.custom_gradient
    def shared(z: Any) -> Any:
        def gradient(d: Any) -> Any:
            every = (d, z) if repl is None else repl.all_gather((d, z), axis=0)
            mean, scale = (tf.reduce_mean(y, 0, keepdims=True) for y in every)
            return tf.ones_like(d) * mean * scale

        return tf.identity(z), gradient

    return tf.reduce_mean(shared(tf.tanh(x @ w)) ** 3)


def _recomputed(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    """The forward pass communicates once more, in the gradient."""

    @tf.recompute_grad
    def normalized(x: Any) -> Any:
        z = tf.tanh(x @ w)
        z -= _mean(repl, z)
        return z if repl is None else z * repl.broadcast(tf.constant(2.0, z.dtype))

    return tf.reduce_mean(normalized(x) ** 3) / (8 if repl is not None else 1)


LOSSES = [
    *(_gathered, _normalized, _whole, _looped, _penalized, _from_root),
    *(_centred, _centred_by_means, _centred_in_a_function, _centred_in_a_loop),
    *(_gathered_back, _recomputed),
]


def _one_device(loss_fn: Any, size: int, value: Any = W) -> Any:
    w = tf.Variable(value)
    with tf.GradientTape() as tape:
        loss = loss_fn(None, w, tf.constant(X[:size]))
    return tape.gradient(loss, w).numpy()


def _make_step(repl: replicator.Replicator, loss_fn: Any, **options: Any) -> Any:
    """Returns the step and its variable, from which it subtracts the gradient."""
    with repl.context():
        w = tf.Variable(W)
        optimizer = repl.wrap_optimizer(
            tf.compat.v1.train.GradientDescentOptimizer(1.0), **options
        )

    def step_fn(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(repl, w, x)
            if options.get("op") == "sum":
                loss *= tf.cast(repl.weight, loss.dtype)
        return optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    return step_fn, w


@pytest.mark.battery(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_it_is_the_gradient_of_one_device(loss_fn: Any, size: int) -> None:
    repl = helpers.make(3)
    step_fn, w = _make_step(repl, loss_fn)
    repl.run(step_fn, X[:size], input_mode="global_batch")
    np.testing.assert_allclose(W - w.numpy(), _one_device(loss_fn, size), atol=1e-7)


@pytest.mark.parametrize("loss_fn", [_gathered, _looped])
def test_sizes_that_are_unknown_when_the_step_is_built(loss_fn: Any) -> None:
    repl = helpers.make(3)
    step_fn, w = _make_step(repl, loss_fn)
    batches = tf.data.Dataset.from_tensor_slices(X[:5]).batch(6)
    repl.run(step_fn, batches, input_mode="global_batch")
    np.testing.assert_allclose(W - w.numpy(), _one_device(loss_fn, 5), atol=1e-7)


def test_in_a_session() -> None:
    repl = helpers.make(3)
    with tf.Graph().as_default(), helpers.session() as session:
        step_fn, w = _make_step(repl, _gathered)
        x = tf.compat.v1.placeholder(tf.float64, [None, 2])
        result = repl.run(step_fn, x, input_mode="global_batch")
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(result, {x: X[:5]})
        updated = session.run(w)
    np.testing.assert_allclose(W - updated, _one_device(_gathered, 5), atol=1e-7)


def test_a_loss_that_weighs_itself_is_left_alone() -> None:
    repl = helpers.make(3)
    step_fn, w = _make_step(repl, _gathered, op="sum")
    repl.run(step_fn, X[:5], input_mode="global_batch")
    np.testing.assert_allclose(W - w.numpy(), _one_device(_gathered, 5), atol=1e-7)


def test_two_optimizers_whose_gradients_are_taken_first() -> None:
    repl = helpers.make(3)
    with repl.context():
        variables = [tf.Variable(W), tf.Variable(W.T)]
        optimizers = [
            repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0)) for _ in variables
        ]
    losses = [_gathered, _whole]

    def step_fn(x: Any) -> None:
        gradients = []
        for loss_fn, w in zip(losses, variables, strict=True):
            with tf.GradientTape() as tape:
                loss = loss_fn(repl, w, x)
            gradients.append(tape.gradient(loss, w))
        for optimizer, d, w in zip(optimizers, gradients, variables, strict=True):
            optimizer.apply([d], [w])

    begun = [w.numpy() for w in variables]
    repl.run(step_fn, X[:5], input_mode="global_batch")
    for loss_fn, w, before in zip(losses, variables, begun, strict=True):
        want = _one_device(loss_fn, 5, before)
        np.testing.assert_allclose(before - w.numpy(), want, atol=1e-7)


# --- Two optimizers, one of which sums ------------------------------------------------

OPS = [("mean", "sum"), ("sum", "mean")]


def _two_steps(repl: replicator.Replicator, ops: tuple[str, ...], own: bool) -> Any:
    """Returns a step whose optimizers both take gradients before either applies them.

    Args:
        repl: The Replicator.
        ops: The ops of the optimizers.
        own: Whether each takes its gradient by a call of its own.
    """
    with repl.context():
        w = tf.Variable(W)
        others = [tf.Variable(tf.zeros_like(W)) for _ in ops]
        optimizers = [
            repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0), op=op) for op in ops
        ]

    def step_fn(x: Any) -> None:
        with tf.GradientTape(persistent=True) as tape:
            plain = _gathered(repl, w + others[0] + others[1], x)
            loss = plain * tf.cast(repl.weight, plain.dtype)
        losses = {"mean": plain, "sum": loss}
        if own:
            taken = [
                tape.gradient(losses[op], other)
                for op, other in zip(ops, others, strict=True)
            ]
        else:
            taken = tape.gradient(plain, others)
        for optimizer, d, other in zip(optimizers, taken, others, strict=True):
            optimizer.apply([d], [other])

    return step_fn, others


@pytest.mark.parametrize("ops", OPS)
def test_an_optimizer_that_adds_up_takes_its_own_gradients(ops: Any) -> None:
    repl = helpers.make(3)
    step_fn, others = _two_steps(repl, ops, own=True)
    repl.run(step_fn, X[:5], input_mode="global_batch")
    for other in others:
        np.testing.assert_allclose(-other.numpy(), _one_device(_gathered, 5), atol=1e-7)


@pytest.mark.parametrize("ops", OPS)
def test_one_gradient_for_a_mean_and_a_sum_is_refused(ops: Any) -> None:
    repl = helpers.make(3)
    step_fn, others = _two_steps(repl, ops, own=False)
    with pytest.raises(replicator.ArgumentError) as raised:
        repl.run(step_fn, X[:5], input_mode="global_batch")
    message = str(raised.value)
    assert 'SGD (op="sum")' in message and 'SGD (op="mean")' in message
    assert message.count("test_weighing.py:") == 2, message
    assert "persistent=True" in message


@pytest.mark.parametrize("ops", OPS)
def test_nor_does_it_run_where_sizes_are_known_only_then(ops: Any) -> None:
    """With equal numbers of examples, nothing is weighted, and the result is right."""
    repl = helpers.make(3)
    step_fn, others = _two_steps(repl, ops, own=False)
    sizes = tf.data.Dataset.from_tensor_slices(X).batch(6)
    repl.run(step_fn, sizes, input_mode="global_batch")
    want = _one_device(_gathered, 6)
    for op, other in zip(ops, others, strict=True):
        factor = 3 if op == "sum" else 1
        np.testing.assert_allclose(-other.numpy(), want * factor, atol=1e-7)
    before = [other.numpy() for other in others]
    uneven = tf.data.Dataset.from_tensor_slices(X[:5]).batch(6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="examples of the") as got:
        repl.run(step_fn, uneven, input_mode="global_batch")
    assert str(got.value).count("test_weighing.py:") == 2
    for other, kept in zip(others, before, strict=True):
        np.testing.assert_array_equal(other.numpy(), kept)


def test_what_a_function_takes_is_found_in_it() -> None:
    """Gradients taken in a tf.function, and in one inside of that."""
    repl = helpers.make(3)
    with repl.context():
        w, v = tf.Variable(W), tf.Variable(W)
        mean = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        total = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0), op="sum")

    def step_fn(x: Any) -> None:
        @tf.function
        def taken(own: Any, weight: Any) -> Any:
            @tf.function
            def inner() -> Any:
                with tf.GradientTape() as tape:
                    loss = _gathered(repl, own, x) * weight
                return tape.gradient(loss, own)

            return inner()

        share = tf.cast(repl.weight, tf.float64)
        d, e = taken(v, share), taken(w, tf.ones_like(share))
        total.apply([d], [v])
        mean.apply([e], [w])

    repl.run(step_fn, X[:5], input_mode="global_batch")
    for one in (v, w):
        np.testing.assert_allclose(
            W - one.numpy(), _one_device(_gathered, 5), atol=1e-7
        )


# --- Calls of a gradient function that send one way -----------------------------------


def _rooted(repl: replicator.Replicator | None, w: Any, x: Any) -> Any:
    @tf.custom_gradient
    def shared(z: Any) -> Any:
        def gradient(d: Any) -> Any:
            return d * repl.broadcast(tf.constant(2.0, d.dtype))  # it could be d

        return tf.identity(z), gradient

    return tf.reduce_mean(shared(tf.tanh(x @ w)))


def test_what_may_or_may_not_be_a_gradient_is_refused_only_if_uneven() -> None:
    repl = helpers.make(3)
    step_fn, w = _make_step(repl, _rooted)
    repl.run(step_fn, X, input_mode="global_batch")
    w_one = tf.Variable(W)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(2 * tf.tanh(X @ w_one))
    np.testing.assert_allclose(W - w.numpy(), tape.gradient(loss, w_one), atol=1e-7)
    with pytest.raises(replicator.ArgumentError) as raised:
        repl.run(step_fn, X[:5], input_mode="global_batch")
    message = str(raised.value)
    assert "broadcast at" in message and "all_reduce" in message, message
    assert message.count("test_weighing.py:") == 2, message


def test_nor_does_that_run_where_sizes_are_known_only_then() -> None:
    repl = helpers.make(3)
    step_fn, w = _make_step(repl, _rooted)
    batches = (
        tf.data.Dataset.from_tensor_slices(X)
        .batch(6)
        .concatenate(tf.data.Dataset.from_tensor_slices(X[:5]).batch(6))
    )
    repl.run(step_fn, batches, input_mode="global_batch")
    before = w.numpy()
    with pytest.raises(tf.errors.InvalidArgumentError, match="broadcast at"):
        repl.run(step_fn, batches, input_mode="global_batch")
    np.testing.assert_array_equal(w.numpy(), before)


def test_an_optimizer_that_adds_up_may_send_one_way() -> None:
    repl = helpers.make(3)
    step_fn, w = _make_step(repl, _rooted, op="sum")
    repl.run(step_fn, X[:5], input_mode="global_batch")
    w_one = tf.Variable(W)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(2 * tf.tanh(X[:5] @ w_one))
    np.testing.assert_allclose(W - w.numpy(), tape.gradient(loss, w_one), atol=1e-7)
