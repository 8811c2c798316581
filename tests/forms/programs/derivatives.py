# SPDX-License-Identifier: Apache-2.0
"""Gradients within a program, of which the loss may take gradients again."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs.values import Builder, Made, calm


def gradient(p: Builder) -> Made | None:
    """The gradient of something computed before, by an argument or a variable."""
    target, _ = p.pick()
    given = [(p.given[k], d) for k, d in (("x", ("n", 3)), ("y", ("n",)), ("c", (3,)))]
    own = [
        (p.variables[k], tuple(p.variables[k].shape))
        for k in ("w", "u", "b", "scale", "table")
    ]
    by, dims = p.of([*given, *own])
    (made,) = tf.gradients(tf.reduce_sum(tf.sin(target)), [by])
    return None if made is None else (calm(tf.convert_to_tensor(made)), dims)


def _network(p: Builder, f: Any) -> Any:
    """Returns a function of rows: a layer, with a loop, a branch, the batch's mean."""
    w, u = (
        tf.convert_to_tensor(p.variables["w"]),
        tf.convert_to_tensor(p.variables["u"]),
    )
    y = tf.reduce_mean(p.given["y"])

    def turn(k, h):
        return (k + 1, tf.tanh(f(h) @ u @ w))

    options: list[Any] = [
        lambda x: tf.tanh(x @ w),
        lambda x: f(tf.tanh(x @ w) @ u) @ w,
        lambda x: tf.tanh((x - tf.reduce_mean(x, 0)) @ w),
        lambda x: tf.while_loop(lambda k, h: k < 2, turn, (0, tf.tanh(x @ w)))[1],
        lambda x: tf.cond(y > 0.1, lambda: tf.tanh(x @ w), lambda: tf.sin(x @ w)),
        lambda x: tf.nn.softmax(x @ tf.transpose(x)) @ x @ w,
        lambda x: tf.map_fn(
            lambda one: tf.tanh(tf.linalg.matvec(w, one, transpose_a=True)), x
        ),
        lambda x: tf.scan(
            lambda h, one: tf.tanh(
                0.5 * h + tf.linalg.matvec(w, one, transpose_a=True)
            ),
            x,
            tf.zeros([4], p.dtype),
        ),
    ]
    return p.of(options)


def penalty(p: Builder) -> Made:
    """The norm of a gradient, by examples or by weights."""
    network = _network(p, p.of([tf.tanh, tf.sin, tf.nn.softplus]))
    x = tf.identity(p.given["x"])
    with tf.GradientTape() as tape:
        tape.watch(x)
        out = network(x)
        total = tf.reduce_sum(out) if p.chance() else tf.reduce_mean(out**2)
    by_x = tape.gradient(total, x)
    norms = tf.sqrt(tf.reduce_sum(by_x**2, 1) + 0.01)
    options: list[Any] = [
        lambda: (norms, ("n",)),
        lambda: (tf.reduce_mean((norms - 1) ** 2), ()),
        lambda: (tf.reduce_sum(by_x**2), ()),
        lambda: (by_x, ("n", 3)),
        lambda: (tf.reduce_max(tf.stop_gradient(norms)) * norms, ("n",)),
    ]
    made, dims = p.of(options)()
    return calm(made), dims


def by_weights(p: Builder) -> Made:
    """An inner step, a product with the Hessian, the norm of a gradient of weights."""
    x, y = p.given["x"], p.given["y"]
    w = tf.convert_to_tensor(p.variables["w"])

    def loss(w: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean((tf.reduce_sum(tf.tanh(x @ w), 1) - y) ** 2)

    def slope(w: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(w)
            value = loss(w)
        return tape.gradient(value, w)

    def product() -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(w)
            along = tf.reduce_sum(slope(w) * tf.stop_gradient(tf.sin(w)))
        return tape.gradient(along, w)

    def forward() -> tf.Tensor:
        with tf.autodiff.ForwardAccumulator(w, tf.ones_like(w)) as accumulator:
            value = tf.reduce_sum(tf.tanh(x @ w), 1)
        return accumulator.jvp(value)

    options: list[Any] = [
        lambda: (loss(w - 0.1 * slope(w)), ()),
        lambda: (tf.reduce_sum(slope(w) ** 2), ()),
        lambda: (product(), (3, 4)),
        lambda: (x @ (w - 0.1 * slope(w)), ("n", 4)),
        lambda: (forward(), ("n",)),
        lambda: (tf.linalg.global_norm([slope(w), slope(0.5 * w)]), ()),
        lambda: (
            tf.while_loop(
                lambda k, v: k < 2, lambda k, v: (k + 1, v - 0.1 * slope(v)), (0, w)
            )[1],
            (3, 4),
        ),
    ]
    made, dims = p.of(options)()
    return calm(made), dims


def jacobian(p: Builder) -> Made:
    """Jacobians and Hessians, by a loop or vectorized."""
    x, is_vectorized = tf.identity(p.given["x"]), p.chance(0.7)
    w = tf.convert_to_tensor(p.variables["w"])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, w])
        each = tf.tanh(x @ w)
        total = tf.reduce_mean(each, 0)
        with tf.GradientTape() as inner:
            inner.watch(w)
            value = tf.reduce_mean(tf.tanh(x @ w) ** 2)
        slope = inner.gradient(value, w)
    own = {"experimental_use_pfor": is_vectorized}
    options: list[Any] = [
        lambda: (tape.batch_jacobian(each, x, **own), ("n", 4, 3)),
        lambda: (tape.jacobian(total, w, **own), (4, 3, 4)),
        lambda: (tape.jacobian(slope, w, **own)[:, 0], (3, 3, 4)),
        lambda: (tape.jacobian(total, x, **own), (4, "n", 3)),
    ]
    return p.of(options)()


def of_both(p: Builder) -> Made:
    """A value and the gradient of its own network, as in energy models and physics."""
    x, f = p.given["x"], p.of([tf.tanh, tf.sin, tf.nn.softplus])
    network = _network(p, f)

    def energy(x):
        return tf.reduce_sum(network(x) ** 2)

    e = energy(x)
    (force,) = tf.gradients(e, x)
    (second,) = tf.gradients(tf.reduce_sum(force * tf.stop_gradient(f(x))), x)
    second = tf.zeros_like(x) if second is None else second
    options: list[Any] = [
        lambda: (x - 0.1 * force, ("n", 3)),
        lambda: (second, ("n", 3)),
        lambda: (
            tf.reduce_sum(second * x, 1) + e / (1 + tf.abs(tf.stop_gradient(e))),
            ("n",),
        ),
        lambda: (tf.reduce_mean(tf.square(force - second), 0), (3,)),
    ]
    made, dims = p.of(options)()
    return calm(made), dims


MAKERS = (gradient, gradient, penalty, by_weights, jacobian, of_both)
