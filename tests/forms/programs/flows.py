# SPDX-License-Identifier: Apache-2.0
"""Conditionals, loops, maps, scans and functions, also one within the other."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tests.forms.programs import arithmetic
from tests.forms.programs.values import Builder, Made, calm, rounded


def _condition(p: Builder) -> tf.Tensor:
    """Returns a truth value of the whole batch."""
    y = p.given["y"]
    options: list[Any] = [
        lambda: tf.reduce_sum(y) > 0.2,
        lambda: p.n > 4,
        lambda: tf.reduce_any(p.mask()),
        lambda: tf.reduce_all(p.mask()),
        lambda: tf.equal(tf.reduce_max(p.given["i"]) % 2, 0),
        lambda: p.variables["is_on"].read_value(),
        lambda: tf.logical_and(p.n > 2, tf.reduce_min(y) < -0.5),
    ]
    return p.of(options)()


def branch(p: Builder) -> Made:
    a, dims = p.pick()
    b, _ = p.pick(lambda other: other == dims)
    f, g = p.of(arithmetic.UNARY), p.of(arithmetic.UNARY)
    total, w = tf.reduce_sum(p.given["y"]), p.variables["scale"]
    if_ = _condition(p)
    inner = _condition(p)
    which = tf.cast(tf.reduce_max(p.given["i"]) % 3, tf.int32)
    options: list[Any] = [
        lambda: tf.cond(if_, lambda: f(a), lambda: g(a)),
        lambda: tf.cond(if_, lambda: f(a), lambda: a + total),
        lambda: tf.cond(if_, lambda: f(a) * tf.reduce_mean(b), lambda: g(b)),
        lambda: tf.cond(if_, lambda: a - tf.reduce_mean(a), lambda: tf.zeros_like(a)),
        lambda: tf.cond(if_, lambda: f(a) * tf.reduce_sum(w), lambda: g(a)),
        lambda: tf.cond(
            if_, lambda: tf.cond(inner, lambda: f(a), lambda: g(b)), lambda: a + b
        ),
        lambda: tf.switch_case(which, [lambda: f(a), lambda: g(b), lambda: a * 0.5]),
        lambda: tf.case([(if_, lambda: f(a)), (inner, lambda: g(a))], lambda: b),
        lambda: tf.cond(if_, lambda: _turns(p, a, f), lambda: g(a)),
        lambda: tf.cond(if_, lambda: (f(a), b), lambda: (b, g(a)))[1],
        lambda: a * tf.cond(if_, lambda: p.number(1.5), lambda: tf.reduce_mean(b)),
    ]
    return calm(p.of(options)()), dims


def _turns(p: Builder, a: tf.Tensor, f: Any) -> tf.Tensor:
    def turn(k, c):
        return (k + 1, tf.tanh(0.9 * c + tf.reduce_mean(f(a))))

    return tf.while_loop(lambda k, c: k < 2, turn, (0, a))[1]


def loop(p: Builder) -> Made:
    a, dims = p.pick()
    b, _ = p.pick(lambda other: other == dims)
    f, w, turns = (
        p.of(arithmetic.UNARY),
        p.variables["scale"],
        int(p.rng.integers(1, 4)),
    )
    share = 1 / p.number(p.n)

    def while_(body: Any, *first: Any, until: Any = None, **options: Any) -> Any:
        condition = until or (lambda k, *_: k < turns)
        return tf.while_loop(
            condition, lambda k, *c: (k + 1, *body(k, *c)), (0, *first), **options
        )

    def largest(k, c):
        return tf.logical_and(k < 9, rounded(tf.reduce_max(c)) < 3.1372513)

    def grow(k, c):
        return [1.7 * tf.abs(c) + 0.3]

    options: list[Any] = [
        lambda: _turns(p, a, f),
        lambda: while_(lambda k, c: [tf.tanh(0.9 * c + f(a))], a)[1],
        lambda: while_(lambda k, c: [tf.tanh(c * tf.reduce_sum(w) + f(b))], a)[1],
        lambda: while_(lambda k, c, d: [tf.tanh(d), 0.5 * c + f(b)], a, b)[2],
        lambda: (
            while_(
                lambda k, c, s: [0.7 * f(c), s + tf.reduce_sum(c) * share],
                a,
                p.number(0),
            )[2]
            + a
        ),
        lambda: while_(
            lambda k, c, s: [f(c) * tf.tanh(s), tf.reduce_mean(c)], a, p.number(1)
        )[1],
        lambda: while_(
            lambda k, c: [c + tf.cond(k > 0, lambda: f(a), lambda: tf.zeros_like(a))], a
        )[1],
        lambda: while_(
            lambda k, c: [while_(lambda j, e: [tf.tanh(e + f(b))], c)[1]], a
        )[1],
        lambda: while_(
            lambda k, c: [tf.tanh(c - tf.reduce_mean(c))], a, maximum_iterations=2
        )[1],
        lambda: _kept(p, a, f, turns),
    ]
    if p.is_exact:
        options += [lambda: while_(grow, tf.tanh(a), until=largest)[1]]
    return calm(p.of(options)()), dims


def _kept(p: Builder, a: tf.Tensor, f: Any, turns: int) -> tf.Tensor:
    """Writes each turn's value into a TensorArray."""
    array = tf.TensorArray(p.dtype, size=turns, element_shape=a.shape)

    def turn(k: tf.Tensor, c: tf.Tensor, kept: Any) -> Any:
        c = tf.tanh(f(c) + 0.3 * a)
        return k + 1, c, kept.write(k, c)

    kept = tf.while_loop(lambda k, *_: k < turns, turn, (0, a, array))[2]
    return p.of(
        [lambda: tf.reduce_mean(kept.stack(), 0), lambda: kept.read(turns - 1)]
    )()


def of_each(p: Builder) -> Made:
    """Maps or scans the first dimension: the batch, or what is in front of it."""
    a, dims = p.pick(lambda d: len(d) > 0 and d[0] in ("n", "k", "T", 2, 3, 4))
    b, _ = p.pick(lambda other: other[:1] == dims[:1])
    f, g = p.of(arithmetic.UNARY), p.of(arithmetic.UNARY)
    y, rest = p.given["y"], dims[1:]
    if not dims or not b.shape.rank:
        return a, dims
    options: list[Any] = [
        lambda: (tf.map_fn(lambda one: f(one) - tf.reduce_sum(g(one)), a), dims),
        lambda: (tf.map_fn(lambda one: f(one) * tf.reduce_mean(y), a), dims),
        lambda: (
            tf.map_fn(
                lambda one: tf.reduce_sum(one[0]) + f(one[1]),
                (b, a),
                fn_output_signature=p.dtype,
            ),
            dims,
        ),
        lambda: (
            tf.vectorized_map(lambda one: f(one) + tf.reduce_sum(g(one)), a),
            dims,
        ),
        lambda: (tf.scan(lambda c, one: 0.5 * c + f(one), a), dims),
        lambda: (
            tf.scan(
                lambda c, one: 0.5 * c + f(one), a, tf.zeros(tf.shape(a)[1:], p.dtype)
            ),
            dims,
        ),
        lambda: (tf.scan(lambda c, one: 0.5 * c + f(one), a, reverse=True), dims),
        lambda: (tf.foldl(lambda c, one: 0.5 * c + f(one), a), rest),
        lambda: (
            tf.map_fn(
                lambda one: (
                    tf.reduce_mean(tf.map_fn(f, one)) if one.shape.rank else f(one)
                ),
                a,
            ),
            dims[:1] if rest else dims,
        ),
        lambda: (
            tf.map_fn(
                lambda k: tf.reduce_sum(f(a[k])),
                tf.range(tf.shape(a)[0]),
                fn_output_signature=p.dtype,
            ),
            dims[:1],
        ),
        lambda: (
            tf.map_fn(
                lambda k: tf.tanh(p.number(k)) * 0.3,
                tf.range(tf.shape(a)[0]),
                fn_output_signature=p.dtype,
            ),
            dims[:1],
        ),
    ]
    made, found = p.of(options)()
    return calm(made), found


def over_time(p: Builder) -> Made:
    """A recurrent network: a loop over time of a batch, masked by lengths."""
    t, lengths = p.given["t"], p.given["lengths"]
    times = p.values[[v.maker for v in p.values].index("t")].dims[1]
    w, u = p.variables["w"], p.variables["u"]
    length, cell = tf.shape(t)[1], lambda x, h: tf.tanh(x @ w + 0.5 * (h @ u) @ w)
    first = tf.zeros([p.n, 4], p.dtype)
    steps = tf.transpose(t, [1, 0, 2])

    def by_while(is_masked: bool) -> tf.Tensor:
        def turn(k: tf.Tensor, h: tf.Tensor) -> Any:
            new = cell(t[:, k], h)
            return k + 1, tf.where((k < lengths)[:, None], new, h) if is_masked else new

        return tf.while_loop(lambda k, h: k < length, turn, (0, first))[1]

    def attention() -> tf.Tensor:
        hidden = tf.scan(lambda h, x: cell(x, h), steps, first)
        scores = tf.reduce_sum(hidden * hidden[-1:], 2)
        return tf.reduce_sum(tf.nn.softmax(scores, 0)[:, :, None] * hidden, 0)

    def decoded() -> tf.Tensor:
        def turn(h: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            best = tf.argmax(rounded(h) if p.is_exact else tf.zeros_like(h), 1)
            return cell(tf.gather(p.variables["table"], best), h)

        return tf.foldl(turn, tf.range(3), first)

    options: list[Any] = [
        lambda: (by_while(False), ("n", 4)),
        lambda: (by_while(True), ("n", 4)),
        lambda: (tf.scan(lambda h, x: cell(x, h), steps, first), (times, "n", 4)),
        lambda: (tf.foldr(lambda h, x: cell(x, h), steps, first), ("n", 4)),
        lambda: (attention(), ("n", 4)),
        lambda: (decoded(), ("n", 4)),
    ]
    return p.of(options)()


def called(p: Builder) -> Made:
    """Calls a function, has a gradient of its own, or is computed again for it."""
    a, dims = p.pick()
    f, share = p.of(arithmetic.UNARY), p.number(0.1)

    @tf.function(autograph=False)
    def inner(a: tf.Tensor) -> tf.Tensor:
        return f(a) - tf.reduce_mean(a)

    @tf.function(autograph=False)
    def outer(a: tf.Tensor) -> tf.Tensor:
        return tf.cond(
            tf.reduce_sum(a * 0) > 1,
            lambda: a,
            lambda: inner(a) * tf.reduce_sum(p.variables["b"]),
        )

    @tf.custom_gradient
    def clipped(a: tf.Tensor) -> Any:
        return tf.identity(a), lambda d: tf.clip_by_value(d, -share, share)

    @tf.custom_gradient
    def over_norm(a: tf.Tensor) -> Any:
        return tf.identity(a), lambda d: d / (tf.sqrt(tf.reduce_sum(d * d)) + 0.1)

    @tf.custom_gradient
    def reversed_(a: tf.Tensor) -> Any:
        return tf.identity(a), lambda d: -d

    options: list[Any] = [
        lambda: inner(a),
        lambda: outer(a),
        lambda: inner(inner(a)),
        lambda: clipped(a),
        lambda: over_norm(a),
        lambda: reversed_(a),
        lambda: tf.recompute_grad(lambda a: tf.tanh(f(a) - tf.reduce_mean(a)))(a),
        lambda: tf.grad_pass_through(tf.round)(rounded(a) if p.is_exact else a * 0),
    ]
    made = p.of(options)()
    return calm(tf.ensure_shape(made, a.shape)), dims


def from_outside(p: Builder) -> Made:
    """Calls Python, which sees the values of one device."""
    a, dims = p.pick()

    def normalized(b):
        return b - b.mean() if b.size else b

    made = tf.numpy_function(normalized, [a], p.dtype)
    made.set_shape(a.shape)
    return a + tf.tanh(made), dims


MAKERS = (branch, branch, loop, loop, of_each, of_each, over_time, called, from_outside)
