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
from tests.primitives.losses import (
    SIZES,
    Repl,
    W,
    X,
    gathered,
    gradient_of,
    mean,
    one_device,
    unknown,
    update,
    update_in_a_session,
)


def _centre(repl: Repl, y: Any) -> Any:
    return mean(repl, tf.reduce_mean(y, axis=0))


def _normalized(repl: Repl, w: Any, x: Any) -> Any:
    y = x @ w
    y -= _centre(repl, y)
    y *= tf.math.rsqrt(_centre(repl, y**2) + 0.1)
    return tf.reduce_mean(y * x**2)


def _whole(repl: Repl, w: Any, x: Any) -> Any:
    return _centre(repl, tf.tanh(x @ w)[:, 0])


def _looped(repl: Repl, w: Any, x: Any) -> Any:
    def body(k: Any, y: Any) -> Any:
        return k + 1, tf.tanh(y @ w) - _centre(repl, y)

    y = tf.while_loop(lambda k, _: k < 3, body, [0, x])[1]
    return tf.reduce_mean(y * x**2)


def _penalized(repl: Repl, w: Any, x: Any) -> Any:
    """The norm of the gradient of all examples' result, as a critic's penalty."""
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.tanh(x @ w)
        y -= _centre(repl, y**2)
        total = tf.reduce_sum(y * x)
    return tf.reduce_mean(tape.gradient(total, x) ** 2)


def _from_root(repl: Repl, w: Any, x: Any) -> Any:
    centre = tf.reduce_sum(w**2)
    if repl is not None:
        centre = repl.broadcast(centre, root=0)
    return tf.reduce_mean((x @ w - centre) ** 2)


def _centred(repl: Repl, w: Any, x: Any) -> Any:
    """A layer that comes with its own gradient, which sums over the replicas."""

    def total(z: Any) -> Any:
        z = tf.reduce_sum(z, axis=0)
        return z if repl is None else repl.all_reduce(z)

    @tf.custom_gradient
    def centre(z: Any) -> Any:
        count = total(tf.ones_like(z))
        return z - total(z) / count, lambda d: d - total(d) / count

    return tf.reduce_mean(centre(tf.tanh(x @ w)) ** 3)


def _centred_by_means(repl: Repl, w: Any, x: Any) -> Any:
    centre = tf.custom_gradient(lambda z: (z - _centre(repl, z), centred))

    def centred(d: Any) -> Any:
        return d - _centre(repl, d)

    return tf.reduce_mean(centre(tf.tanh(x @ w)) ** 3)


def _centred_in_a_function(repl: Repl, w: Any, x: Any) -> Any:
    return tf.function(lambda: _centred(repl, w, x))()


def _centred_in_a_loop(repl: Repl, w: Any, x: Any) -> Any:
    @tf.custom_gradient
    def centre(z: Any) -> Any:
        return z - _centre(repl, z), lambda d: d - _centre(repl, d)

    def body(k: Any, y: Any) -> Any:
        return k + 1, centre(tf.tanh(y @ w))

    y = tf.while_loop(lambda k, _: k < 3, body, [0, x])[1]
    return tf.reduce_mean(y * x**2)


def _gathered_back(repl: Repl, w: Any, x: Any) -> Any:
    """Every example's gradient is the mean of all, sent beside a value."""

    @tf.custom_gradient
    def shared(z: Any) -> Any:
        def gradient(d: Any) -> Any:
            every = (d, z) if repl is None else repl.all_gather((d, z), axis=0)
            mean, scale = (tf.reduce_mean(y, 0, keepdims=True) for y in every)
            return tf.ones_like(d) * mean * scale

        return tf.identity(z), gradient

    return tf.reduce_mean(shared(tf.tanh(x @ w)) ** 3)


def _recomputed(repl: Repl, w: Any, x: Any) -> Any:
    """The forward pass communicates once more, in the gradient."""

    @tf.recompute_grad
    def normalized(x: Any) -> Any:
        z = tf.tanh(x @ w)
        z -= _centre(repl, z)
        return z if repl is None else z * repl.broadcast(tf.constant(2.0, z.dtype))

    return tf.reduce_mean(normalized(x) ** 3) / (8 if repl is not None else 1)


LOSSES = [
    *(gathered, _normalized, _whole, _looped, _penalized, _from_root),
    *(_centred, _centred_by_means, _centred_in_a_function, _centred_in_a_loop),
    *(_gathered_back, _recomputed),
]


def _v1() -> Any:
    return tf.compat.v1.train.GradientDescentOptimizer(1.0)


def _assert_gradient(found: Any, loss_fn: Any, size: int = 5) -> None:
    want = one_device(gradient_of(loss_fn), size)
    np.testing.assert_allclose(found, want, atol=1e-7)


@pytest.mark.battery(6)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("loss_fn", LOSSES)
def test_it_is_the_gradient_of_one_device(loss_fn: Any, size: int) -> None:
    found = update(gradient_of(loss_fn), X[:size], _v1())
    _assert_gradient(found, loss_fn, size)


@pytest.mark.parametrize("loss_fn", [gathered, _looped])
def test_sizes_that_are_unknown_when_the_step_is_built(loss_fn: Any) -> None:
    _assert_gradient(update(gradient_of(loss_fn), unknown(5), _v1()), loss_fn)


def test_in_a_session() -> None:
    _assert_gradient(update_in_a_session(gradient_of(gathered), 5), gathered)


def _weighed(loss_fn: Any) -> Any:
    """The gradient of the share of a loss in the mean of all examples."""

    def loss(repl: Repl, w: Any, x: Any) -> Any:
        value = loss_fn(repl, w, x)
        return value if repl is None else value * tf.cast(repl.weight, value.dtype)

    return gradient_of(loss)


def test_a_loss_that_weighs_itself_is_left_alone() -> None:
    _assert_gradient(update(_weighed(gathered), X[:5], _v1(), op="sum"), gathered)


def test_two_optimizers_whose_gradients_are_taken_first() -> None:
    repl = helpers.make(3)
    with repl.context():
        variables = [tf.Variable(W), tf.Variable(W.T)]
        optimizers = [
            repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0)) for _ in variables
        ]
    losses = [gathered, _whole]

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
        want = one_device(gradient_of(loss_fn), 5, before)
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
            plain = gathered(repl, w + others[0] + others[1], x)
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
        np.testing.assert_allclose(
            -other.numpy(), one_device(gradient_of(gathered), 5), atol=1e-7
        )


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
    want = one_device(gradient_of(gathered), 6)
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
        average = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))
        total = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0), op="sum")

    def step_fn(x: Any) -> None:
        @tf.function
        def taken(own: Any, weight: Any) -> Any:
            @tf.function
            def inner() -> Any:
                with tf.GradientTape() as tape:
                    loss = gathered(repl, own, x) * weight
                return tape.gradient(loss, own)

            return inner()

        share = tf.cast(repl.weight, tf.float64)
        d, e = taken(v, share), taken(w, tf.ones_like(share))
        total.apply([d], [v])
        average.apply([e], [w])

    repl.run(step_fn, X[:5], input_mode="global_batch")
    for one in (v, w):
        _assert_gradient(W - one.numpy(), gathered)


# --- Calls of a gradient function that send one way -----------------------------------


def _rooted(repl: Repl, w: Any, x: Any) -> Any:
    @tf.custom_gradient
    def shared(z: Any) -> Any:
        def gradient(d: Any) -> Any:
            two = tf.constant(2.0, d.dtype)
            return d * (two if repl is None else repl.broadcast(two))  # it could be d

        return tf.identity(z), gradient

    return tf.reduce_mean(shared(tf.tanh(x @ w)))


def test_what_may_or_may_not_be_a_gradient_is_refused_only_if_uneven() -> None:
    _assert_gradient(update(gradient_of(_rooted), X, _v1()), _rooted, 6)
    with pytest.raises(replicator.ArgumentError) as raised:
        update(gradient_of(_rooted), X[:5], _v1())
    message = str(raised.value)
    assert "broadcast at" in message and "all_reduce" in message, message
    assert message.count("losses.py:") == 2, message


def test_nor_does_that_run_where_sizes_are_known_only_then() -> None:
    _assert_gradient(update(gradient_of(_rooted), unknown(6), _v1()), _rooted, 6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="broadcast at"):
        update(gradient_of(_rooted), unknown(5), _v1())


def test_an_optimizer_that_adds_up_may_send_one_way() -> None:
    _assert_gradient(update(_weighed(_rooted), X[:5], _v1(), op="sum"), _rooted)


# --- Gradients that a variable keeps --------------------------------------------------


def _kept(batch: Any) -> np.ndarray:
    """Returns the update by gradients that each replica adds to a variable first."""
    repl = helpers.make(3)
    with repl.context():
        w = tf.Variable(W)
        kept = tf.Variable(
            tf.zeros_like(W),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
        optimizer = repl.wrap_optimizer(tf.keras.optimizers.SGD(1.0))

    def step_fn(x: Any) -> None:
        kept.assign_add(gradient_of(gathered)(repl, w, x))
        optimizer.apply_gradients([(kept.read_value(), w)])

    repl.run(step_fn, batch, "global_batch")
    return W - w.numpy()


@pytest.mark.parametrize("as_batch", [lambda size: X[:size], unknown])
def test_gradients_that_a_variable_keeps_are_refused_if_uneven(as_batch: Any) -> None:
    _assert_gradient(_kept(as_batch(6)), gathered, 6)
    refused = (replicator.ArgumentError, tf.errors.InvalidArgumentError)
    with pytest.raises(refused, match="(?s)read from variable .*accumulation_steps=k"):
        _kept(as_batch(5))
