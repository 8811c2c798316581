# SPDX-License-Identifier: Apache-2.0
"""Loop variables of all kinds, beside communication."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers


@pytest.mark.parametrize("mode", helpers.MODES)
def test_integers_truth_and_text(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        r = repl.replica_id

        def turn(n: Any, go: Any, text: Any, x: Any) -> Any:
            go = repl.all_reduce(tf.logical_and(go, n < 2 + r), "min")
            return n + 1, go, repl.broadcast(text) + "x", repl.all_reduce(x)

        start = [tf.constant(0), tf.constant(True), tf.constant("ab"[r]), r + 1]
        return tf.while_loop(lambda n, go, text, x: go, turn, start)

    n, go, text, x = helpers.run(mode, repl, lambda: step)
    assert list(n) == [3, 3]
    assert list(go) == [False, False]
    assert list(text) == [b"axxx"] * 2
    assert list(x) == [12, 12]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_tensor_arrays_and_their_gradients(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque([1.0, 2.0, 3.0]) * (repl.replica_id + 1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            array = tf.TensorArray(tf.float32, size=3).unstack(x)
            made = tf.TensorArray(tf.float32, size=3)
            made = tf.while_loop(
                lambda n, _: n < 3,
                lambda n, made: (
                    n + 1,
                    made.write(n, repl.all_reduce(array.read(n)) ** 2),
                ),
                [tf.constant(0), made],
            )[1]
            y = made.stack()
        return y, tape.gradient(y, x)

    y, d = helpers.run(mode, repl, lambda: step)
    for r in range(2):
        assert y[r].tolist() == [9.0, 36.0, 81.0]
        assert d[r].tolist() == [12.0, 24.0, 36.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_tensor_array_that_grows(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        def turn(n: tf.Tensor, made: Any) -> Any:
            return n + 1, made.write(n, repl.all_reduce(n + repl.replica_id))

        made = tf.TensorArray(tf.int32, size=0, dynamic_size=True)
        return tf.while_loop(lambda n, _: n < 3, turn, [tf.constant(0), made])[
            1
        ].stack()

    for replica_values in helpers.run(mode, repl, lambda: step):
        assert replica_values.tolist() == [1, 3, 5]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_shapes_that_grow_and_differ_by_replica(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque([repl.replica_id + 1.0] * (repl.replica_id + 1), [None])

        def turn(n: tf.Tensor, y: tf.Tensor) -> Any:
            return n + 1, tf.concat([y, repl.all_gather(y, axis=0)], 0)

        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(
                lambda n, y: n < 2,
                turn,
                [tf.constant(0), x],
                shape_invariants=[tf.TensorShape([]), tf.TensorShape([None])],
            )[1]
            loss = tf.reduce_sum(y**2)
        return y, tape.gradient(loss, x)

    xs = [tf.constant([1.0]), tf.constant([2.0, 2.0])]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        ys = xs
        for _ in range(2):
            ys = [tf.concat([y, *ys], 0) for y in ys]
        loss = tf.add_n([tf.reduce_sum(y**2) for y in ys])
    for got, want in zip(
        helpers.run(mode, repl, lambda: step),
        (ys, tape.gradient(loss, xs)),
        strict=True,
    ):
        for one, two in zip(got, want, strict=True):
            np.testing.assert_allclose(one, two)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_ragged_tensors(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(
            helpers.opaque([1.0, 2.0, 3.0]) * (repl.replica_id + 1.0), [1, 2]
        )

        def turn(n: tf.Tensor, ragged: tf.RaggedTensor) -> Any:
            total = repl.all_reduce(ragged.flat_values)
            return n + 1, ragged.with_flat_values(total)

        turned = tf.while_loop(lambda n, _: n < 2, turn, [tf.constant(0), ragged])[1]
        return turned.to_tensor()

    for replica_values in helpers.run(mode, repl, lambda: step):
        assert replica_values.tolist() == [[6.0, 0.0], [12.0, 18.0]]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_jacobian_row_by_row(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque([1.0, 2.0]) * (repl.replica_id + 1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x**2)
        return tape.jacobian(y, x, experimental_use_pfor=False)

    for r, own in enumerate(helpers.run(mode, repl, lambda: step)):
        np.testing.assert_allclose(own, 2 * 2 * (r + 1) * np.diag([1.0, 2.0]))


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("where", ["conditional", "loop"])
def test_a_gradient_taken_inside(where: str, mode: str) -> None:
    """Of a call outside of the conditional; and of one inside of the loop."""
    repl = helpers.make(2)

    def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x * x)
        return n + 1, tape.gradient(y, x)

    def step() -> tf.Tensor:
        x = helpers.opaque(repl.replica_id + 1.0)
        if where == "loop":
            return tf.while_loop(lambda n, x: n < 1, turn, [tf.constant(0), x])[1]
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.all_reduce(x * x)
        return tf.cond(helpers.opaque(True), lambda: tape.gradient(y, x), lambda: x)

    assert list(helpers.run(mode, repl, lambda: step)) == [4.0, 8.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_an_assertion_that_fails_in_a_loop_says_so(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        def turn(n: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            tf.debugging.assert_less(n * repl.replica_id, 2, message="too far")
            return n + 1, repl.all_reduce(x)

        x = helpers.opaque(1.0)
        return tf.while_loop(lambda n, x: n < 4, turn, [tf.constant(0), x])[1]

    with pytest.raises(tf.errors.InvalidArgumentError, match="too far"):
        helpers.run(mode, repl, lambda: step)
