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

DTYPES = ["bool", "int8", "uint64", "float16", "bfloat16", "complex64", "string"]
SCALAR = tf.TensorSpec([])


# --- Received messages ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(dtype: str) -> None:
    values = np.array([1, 0, 1])
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque(values)
        x = tf.as_string(x) if dtype == "string" else tf.cast(x, dtype)
        if repl.replica_id == 0:
            assert repl.send(x, 1) is None
            return tf.zeros([3], tf.int64)
        y = repl.recv(tf.TensorSpec([3], dtype), 0)
        assert y.dtype == dtype
        assert y.device == repl.devices[1]
        return (
            tf.strings.to_number(y, tf.int64)
            if dtype == "string"
            else tf.cast(y, tf.int64)
        )

    np.testing.assert_array_equal(repl.run(step)[1], values)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_nests_of_specs_and_tensors(mode: str) -> None:
    repl = helpers.make(2)
    spec = {"b": [tf.TensorSpec(None, tf.int32), ""], "a": (np.zeros([2]), ())}

    def step() -> Any:
        x = {"b": [helpers.opaque(3), "text"], "a": (np.array([1.0, 2.0]), ())}
        if repl.replica_id == 0:
            repl.send(x, 1)
            return x
        return repl.recv(spec, 0)

    result = helpers.run(mode, repl, lambda: step)
    assert [int(n) for n in result["b"][0]] == [3, 3]
    assert list(result["b"][1]) == [b"text", b"text"]
    np.testing.assert_array_equal(result["a"][0], [[1.0, 2.0]] * 2)


def test_an_empty_nest_needs_no_message() -> None:
    repl = helpers.make(2)
    assert repl.run(lambda: repl.send([], 1 - repl.replica_id) or []) == []
    assert repl.run(lambda: repl.recv([], 1 - repl.replica_id)) == []


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


@pytest.mark.parametrize("mode", helpers.MODES)
def test_ping_pong(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        ball = helpers.opaque(1.0)
        for _ in range(3):
            if repl.replica_id == 0:
                repl.send(ball, 1)
                ball = repl.recv(SCALAR, 1) + 1.0
            else:
                ball = repl.recv(SCALAR, 0) * 2.0
                repl.send(ball, 0)
        return ball

    assert [float(y) for y in helpers.run(mode, repl, lambda: step)] == [15.0, 14.0]


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_a_ring_adds_up_what_goes_around(num_replicas: int, mode: str) -> None:
    repl = helpers.make(num_replicas)

    def step() -> tf.Tensor:
        r, size = repl.replica_id, repl.num_replicas
        passing = total = helpers.opaque([10.0**r, 1.0])
        for _ in range(size - 1):
            repl.send(passing, (r + 1) % size)
            passing = repl.recv(tf.zeros([2]), (r - 1) % size)
            total += passing
        return total

    want = [sum(10.0**r for r in range(num_replicas)), num_replicas]
    for y in helpers.run(mode, repl, lambda: step):
        np.testing.assert_array_equal(y, want)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_from_one_to_many_and_back(mode: str) -> None:
    repl = helpers.make(4)

    def step() -> tf.Tensor:
        siblings = range(1, repl.num_replicas)
        if repl.replica_id == 0:
            for r in siblings:
                repl.send(helpers.opaque([float(r)]), r)
            return tf.add_n([repl.recv(tf.TensorSpec([1]), r) for r in siblings])
        y = repl.recv(tf.TensorSpec([1]), 0)
        repl.send(y**2, 0)
        return y

    results = helpers.run(mode, repl, lambda: step)
    assert [float(y[0]) for y in results] == [14.0, 1.0, 2.0, 3.0]


def test_replicas_without_messages_do_as_they_like() -> None:
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque(float(repl.replica_id))
        if repl.replica_id == 0:
            repl.send(x + 5.0, 2)
        elif repl.replica_id == 2:
            x += repl.recv(SCALAR, 0)
        return repl.all_reduce(x)

    assert [float(y) for y in repl.run(step)] == [8.0] * 3


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


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("place", PLACES)
def test_inside_control_flow(place: str, mode: str) -> None:
    program = PLACES[place]
    repl = helpers.make(3)
    swap = functools.partial(_swap, repl)
    got = helpers.run(mode, repl, lambda: lambda: program(swap, _own(repl)))
    want = tf.function(lambda: program(_swap_entries, _all()))()
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.battery(10)
@pytest.mark.parametrize(
    ("order", "mode"), [(1, "function"), (1, "session"), (2, "eager"), (2, "session")]
)
@pytest.mark.parametrize("place", PLACES)
def test_derivatives_through_control_flow(place: str, order: int, mode: str) -> None:
    program = PLACES[place]
    repl = helpers.make(3)
    swap = functools.partial(_swap, repl)

    def derivative(
        exchange: Exchange, x: tf.Tensor, linked: Callable[[tf.Tensor], tf.Tensor]
    ) -> tf.Tensor:
        loss = linked(tf.reduce_sum(program(exchange, x) ** 2))
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


@pytest.mark.parametrize("mode", helpers.MODES)
def test_the_gradient_of_what_was_sent_comes_back(mode: str) -> None:
    """For floating leaves; a tensor passed in place of a spec gets zeros."""
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque([1.0, 2.0])
        like = helpers.opaque([np.nan, np.nan])
        with tf.GradientTape() as tape:
            tape.watch([x, like])
            if repl.replica_id == 0:
                repl.send({"x": x, "n": tf.constant(3), "y": x * 2.0}, 1)
                loss = repl.linked(tf.reduce_sum(x))
            else:
                spec = {"x": like, "n": tf.constant(0), "y": tf.TensorSpec([2])}
                got = repl.recv(spec, 0)
                loss = got["x"] ** 3 * tf.cast(got["n"], tf.float32) + got["y"]
        return tape.gradient(loss, [x, like], unconnected_gradients="zero")

    d_x, d_like = helpers.run(mode, repl, lambda: step)
    np.testing.assert_array_equal(d_x, [[1 + 9 + 2, 1 + 36 + 2], [0, 0]])
    np.testing.assert_array_equal(d_like, np.zeros([2, 2]))


def test_nothing_comes_back_to_integers() -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            n = tf.cast(x, tf.int32)
            if repl.replica_id == 0:
                repl.send(n, 1)
                loss = repl.linked(x)
            else:
                loss = x * tf.cast(repl.recv(n, 0), tf.float32)
        return tape.gradient(loss, x)

    assert [float(d) for d in repl.run(step)] == [1.0, 2.0]


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("power", [1, 2, 3])
def test_second_derivatives(power: int, mode: str) -> None:
    """Of x0^power * x1, on replica 1; the returned gradient may be constant in x0."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(3.0 - repl.replica_id)
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                if repl.replica_id == 0:
                    repl.send(x, 1)
                    loss = repl.linked(0.0)
                else:
                    loss = repl.recv(x, 0) ** power * x
            d = tape.gradient(loss, x)
            loss = repl.linked(d)
        return outer.gradient(loss, x)

    mixed = power * 3.0 ** (power - 1)
    both = [power * (power - 1) * 3.0 ** (power - 2) * 2.0 + mixed, mixed]
    np.testing.assert_allclose(helpers.run(mode, repl, lambda: step), both)


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
