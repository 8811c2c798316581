# SPDX-License-Identifier: Apache-2.0
"""send and recv: the messages, their patterns, and the gradients that come back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

SCALAR = tf.TensorSpec([])


# --- Received messages ----------------------------------------------------------------


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("like", [False, True], ids=["spec", "tensor"])
def test_shapes_that_are_only_known_when_it_runs(like: bool, mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(tf.fill([2, 3], 7.0), [None, None])
        if repl.replica_id == 0:
            repl.send(x, 1)
            return x
        return repl.recv(x * 0.0 if like else tf.TensorSpec([None, 3]), 0)

    for y in helpers.run(mode, repl, lambda: step):
        np.testing.assert_array_equal(y, np.full([2, 3], 7.0))


def test_messages_of_one_tag_arrive_in_order_and_tags_are_apart() -> None:
    repl = helpers.make(2)

    def step() -> Any:
        if repl.replica_id == 0:
            for value, tag in ((1.0, 0), (2.0, 5), (3.0, 0), (4.0, 5)):
                repl.send(helpers.opaque(value), 1, tag=tag)
            return [0.0] * 4
        return [repl.recv(SCALAR, 0, tag=tag) for tag in (5, 5, 0, 0)]

    received = [float(y[1]) for y in repl.run(step)]
    assert received == [2.0, 4.0, 1.0, 3.0]


# --- Patterns -------------------------------------------------------------------------


def _ping_pong(repl: Any) -> tf.Tensor:
    ball = helpers.opaque(1.0)
    for _ in range(3):
        if repl.replica_id == 0:
            repl.send(ball, 1)
            ball = repl.recv(SCALAR, 1) + 1.0
        else:
            ball = repl.recv(SCALAR, 0) * 2.0
            repl.send(ball, 0)
    return ball


def _ring(repl: Any) -> tf.Tensor:
    r, size = repl.replica_id, repl.num_replicas
    passing = total = helpers.opaque(10.0**r)
    for _ in range(size - 1):
        repl.send(passing, (r + 1) % size)
        passing = repl.recv(tf.zeros([]), (r - 1) % size)
        total += passing
    return total


def _one_to_many_and_back(repl: Any) -> tf.Tensor:
    siblings = range(1, repl.num_replicas)
    if repl.replica_id == 0:
        for r in siblings:
            repl.send(helpers.opaque(float(r)), r)
        return tf.add_n([repl.recv(SCALAR, r) for r in siblings])
    y = repl.recv(SCALAR, 0)
    repl.send(y**2, 0)
    return y


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize(
    ("program", "want"),
    [
        (_ping_pong, [15.0, 14.0]),
        (_ring, [11.0] * 2),
        (_ring, [1111.0] * 4),
        (_one_to_many_and_back, [14.0, 1.0, 2.0, 3.0]),
    ],
)
def test_patterns(program: Callable[[Any], Any], want: list[float], mode: str) -> None:
    repl = helpers.make(len(want))
    got = helpers.run(mode, repl, lambda: lambda: program(repl))
    assert [float(y) for y in got] == want


# --- Inside control flow --------------------------------------------------------------

# These programs pass a value to `exchange` and continue with its result. On one
# device, x has an entry for each replica, and exchange swaps the entries.
Exchange = Callable[[tf.Tensor], tf.Tensor]


def _swap(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    """Replicas 0 and 1 swap their values; the others keep theirs."""
    other = 1 - repl.replica_id
    if repl.replica_id > 1:
        return x
    repl.send(x, other)
    return repl.linked(repl.recv(x, other))


def _swap_entries(x: tf.Tensor) -> tf.Tensor:
    return tf.gather(x, [1, 0, 2])


def _in_cond(exchange: Exchange, x: tf.Tensor) -> tf.Tensor:
    return tf.cond(helpers.opaque(True), lambda: exchange(x**2) * x, lambda: x)


def _in_loop(exchange: Exchange, x: tf.Tensor) -> tf.Tensor:
    turns = helpers.opaque(3)
    return tf.while_loop(
        lambda k, _: k < turns,
        lambda k, y: (k + 1, exchange(y) * x + 1.0),
        (tf.constant(0), x),
    )[1]


def _in_function(exchange: Exchange, x: tf.Tensor) -> tf.Tensor:
    inner = tf.function(lambda y: exchange(y) * x + 1.0)
    return inner(inner(x)) * 3.0


def _in_all_of_them(exchange: Exchange, x: tf.Tensor) -> tf.Tensor:
    @tf.function
    def inner(x: tf.Tensor) -> tf.Tensor:
        y = x
        for k in tf.range(3):
            if k < 2:
                y = exchange(y) * x + 1.0
        return y

    return inner(x)


PLACES = {
    "cond": _in_cond,
    "loop": _in_loop,
    "function": _in_function,
    "all": _in_all_of_them,
}


def _own(repl: replicator.Replicator) -> tf.Tensor:
    return helpers.opaque(0.5 + repl.replica_id)


def _all() -> tf.Tensor:
    return tf.constant([0.5, 1.5, 2.5])


@pytest.mark.battery(6)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_inside_control_flow(place: str, order: int, mode: str) -> None:
    """Values, and their first and second derivatives."""
    program = PLACES[place]
    repl = helpers.make(3)
    swap = functools.partial(_swap, repl)

    def derivative(
        exchange: Exchange, x: tf.Tensor, linked: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        y = program(exchange, x)
        if order == 0:
            return y
        loss = linked(tf.reduce_sum(y**2))
        (d,) = tf.gradients(loss, x)
        if order == 1:
            return d
        return tf.gradients(linked(tf.reduce_sum(d**2)), x)[0]

    got = helpers.run(
        mode, repl, lambda: lambda: derivative(swap, _own(repl), repl.linked)
    )
    want = tf.function(lambda: derivative(_swap_entries, _all(), tf.identity))()
    np.testing.assert_allclose(got, want, rtol=1e-5)


# --- Gradients ------------------------------------------------------------------------


def _stages(seed: int) -> list[np.ndarray]:
    rng = np.random.RandomState(seed)
    return [rng.randn(*size).astype(np.float32) for size in ((4, 5), (5, 6), (6, 3))]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_pipeline_trains_as_one_device_does(mode: str) -> None:
    """One layer per replica, two micro-batches; activations go on, gradients back."""
    batches = np.random.RandomState(1).randn(2, 8, 4).astype(np.float32)
    repl = helpers.make(3)

    def make_step() -> Callable[[], Any]:
        weights = tf.Variable(_stages(0)[0]), *map(tf.Variable, _stages(0)[1:])

        def step() -> Any:
            r = repl.replica_id
            weight = weights[r]
            loss = tf.constant(0.0)
            with tf.GradientTape() as tape:
                for batch in batches:
                    hidden = tf.constant(batch)
                    if r > 0:
                        like = tf.zeros([8, weight.shape[0]])
                        tape.watch(like)
                        hidden = repl.recv(like, r - 1)
                    hidden = tf.tanh(hidden @ weight)
                    if r < 2:
                        repl.send(hidden, r + 1)
                    else:
                        loss += tf.reduce_mean(hidden**2)
                loss = repl.linked(loss)
            d = tape.gradient(loss, weight)
            return loss, *[
                d if k == r else tf.zeros_like(w) for k, w in enumerate(weights)
            ]

        return step

    losses, *gradients = helpers.run(mode, repl, make_step)
    weights = [tf.constant(w) for w in _stages(0)]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        loss = tf.constant(0.0)
        for hidden in batches:
            for weight in weights:
                hidden = tf.tanh(hidden @ weight)
            loss += tf.reduce_mean(hidden**2)
    assert list(losses[:2]) == [0.0, 0.0]
    np.testing.assert_allclose(losses[2], loss, rtol=1e-6)
    for r, want in enumerate(tape.gradient(loss, weights)):
        np.testing.assert_allclose(gradients[r][r], want, rtol=1e-5, atol=1e-7)
