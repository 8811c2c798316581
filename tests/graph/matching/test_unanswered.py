# SPDX-License-Identifier: Apache-2.0
"""Unused messages have zero gradients; the others are differentiated by their receiver.

Replica 0 sends x to replica 1, which returns a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from tests import helpers

X = [2.0, 5.0]  # the operands of replicas 0 and 1


def _by_tape(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    with tf.GradientTape() as tape:
        tape.watch(x)
        value = loss()
    return tape.gradient(value, x)


def _by_graph(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
    return tf.gradients(loss(), x)[0]


def _gradients(
    mode: str,
    received: Callable[[tf.Tensor, tf.Tensor], Any],
    how: Callable[..., tf.Tensor] = _by_tape,
    spec: bool = False,
) -> list[float]:
    """Returns the gradients by x of x^2, plus on replica 1 a loss of the received x0.

    Args:
        mode: One of helpers.MODES.
        received: Returns an addition to replica 1's loss, and further results, given
            the message and its own x.
        how: Differentiates.
        spec: Whether it receives by a TensorSpec.
    """
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque(X[repl.replica_id])
        more = [tf.zeros([])]

        def loss() -> tf.Tensor:
            if repl.replica_id == 0:
                repl.send(x, 1)
                return repl.linked(x**2)
            came = repl.recv(tf.TensorSpec([]) if spec else x, 0)
            added, more[0] = received(came, x)
            return x**2 if added is None else x**2 + added

        return how(x, loss), more[0]

    return [float(d) for d in helpers.run(mode, repl, lambda: step)[0]]


UNUSED: dict[str, Callable[[tf.Tensor, tf.Tensor], Any]] = {
    "not used": lambda came, x: (None, x),
    "stopped": lambda came, x: (None, tf.stop_gradient(came) + 1.0),
    "stopped, in the loss": lambda came, x: (3.0 * tf.stop_gradient(came), x),
    "an integer": lambda came, x: (None, tf.cast(came, tf.int32)),
    "compared": lambda came, x: (tf.where(came > 1.0, 3.0, 4.0), x),
    "printed": lambda came, x: (tf.print(came), (None, x))[1],
}


@pytest.mark.parametrize("what", UNUSED)
def test_what_is_not_used_has_a_gradient_of_zero(what: str) -> None:
    assert _gradients("eager", UNUSED[what]) == [4.0, 10.0]


@pytest.mark.parametrize("mode", helpers.MODES)
def test_in_all_ways_of_running_and_differentiating(mode: str) -> None:
    for how in (_by_tape, _by_graph):
        assert _gradients(mode, UNUSED["not used"], how) == [4.0, 10.0]


def _listed(value: tf.Tensor) -> tf.Tensor:
    """Puts a value into a list, a variant."""
    empty = tf.raw_ops.EmptyTensorList(
        element_shape=tf.zeros([0], tf.int32),
        max_num_elements=1,
        element_dtype=value.dtype,
    )
    return tf.raw_ops.TensorListPushBack(input_handle=empty, tensor=value)


USED: dict[str, Callable[[tf.Tensor, tf.Tensor], Any]] = {
    "in the loss": lambda came, x: (came * x, x),
    "the loss": lambda came, x: (came, x),
    "not returned": lambda came, x: (came + x, (None, x))[1],
    "out of sight": lambda came, x: (None, x),
    "returned": lambda came, x: (None, came),
    "in a list": lambda came, x: (None, (_listed(came), x)[1]),
    "in a conditional": lambda came, x: (
        tf.cond(x > 1.0, lambda: came * x, lambda: x),
        x,
    ),
}


@pytest.mark.parametrize("what", USED)
def test_what_may_be_part_of_a_loss_is_not_zero(what: str) -> None:
    """Received by a spec, it is on no tape, and could be the loss by itself."""
    with pytest.raises(
        replicator.MismatchError,
        match=r"(?s)A gradient of message 0 .*replica 0 has no partner.*test_unanswered"
        r".*Fix: .*that the tape watches .*tf\.stop_gradient",
    ):
        _gradients("eager", USED[what], spec=True)


def test_a_receiver_that_uses_it_and_does_not_differentiate_is_refused() -> None:
    def how(x: tf.Tensor, loss: Callable[[], tf.Tensor]) -> tf.Tensor:
        value = loss()
        return value if "replica_1" in value.name else tf.gradients(value, x)[0]

    with pytest.raises(replicator.MismatchError, match="A gradient of message 0"):
        _gradients("eager", USED["in the loss"], how)


@pytest.mark.parametrize("what", ["returned", "not returned", "in a list"])
def test_what_may_be_a_loss_is_refused_though_it_is_watched(what: str) -> None:
    with pytest.raises(replicator.MismatchError, match="A gradient of message 0"):
        _gradients("eager", USED[what])


def test_a_second_derivative_of_what_is_not_used() -> None:
    """The request for the gradient is itself differentiated, by replica 0 alone."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(X[repl.replica_id])

        def slope() -> tf.Tensor:
            def loss() -> tf.Tensor:
                if repl.replica_id == 0:
                    repl.send(x * x, 1)
                    return repl.linked(x**3)
                repl.recv(x, 0)
                return x**3

            return repl.linked(_by_tape(x, loss))

        return _by_tape(x, slope)

    assert [float(d) for d in repl.run(step)] == [12.0, 30.0]


# --- Several losses -------------------------------------------------------------------


def _losses(repl: replicator.Replicator, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Two losses, of which replica 0 links the second with a message of the first.

    The gradients are 3 x0^2 and 2 x0.
    """
    if repl.replica_id == 0:
        repl.send(x, 1, tag=1)
        first = repl.linked(0.0)
        repl.send(x, 1, tag=2)
        return first, repl.linked(0.0)
    return repl.recv(x, 0, tag=1) ** 3, repl.recv(x, 0, tag=2) ** 2


def _apart(
    take: Callable[[tf.GradientTape, Any, tf.Tensor], Any], mode: str = "eager"
) -> list[list[float]]:
    repl = helpers.make(2)

    def step() -> Any:
        x = helpers.opaque(X[repl.replica_id])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = _losses(repl, x)
        return take(tape, losses, x)

    got = helpers.run(mode, repl, lambda: step)
    return [[float(d) for d in column] for column in got]


def _in_order(tape: tf.GradientTape, losses: Any, x: tf.Tensor) -> Any:
    one = tape.gradient(losses[0], x)
    two = tape.gradient(losses[1], x)
    return one, two


def _reversed(tape: tf.GradientTape, losses: Any, x: tf.Tensor) -> Any:
    two = tape.gradient(losses[1], x)
    one = tape.gradient(losses[0], x)
    return one, two


def _with_others(tape: tf.GradientTape, losses: Any, x: tf.Tensor) -> Any:
    both = tape.gradient(losses, x)
    two = tape.gradient(losses[1], x)
    one = tape.gradient(losses[0], x)
    return one, two, both


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("take", [_in_order, _reversed, _with_others])
def test_losses_are_differentiated_apart(take: Callable[..., Any], mode: str) -> None:
    want = [[12.0, 0.0], [4.0, 0.0], [16.0, 0.0]]
    got = _apart(take, mode)
    np.testing.assert_array_equal(got, want[: len(got)])


def _on_one_line(tape: tf.GradientTape, losses: Any, x: tf.Tensor) -> Any:
    return [tape.gradient(loss, x) for loss in losses]


def _only_on_the_sender(tape: tf.GradientTape, losses: Any, x: tf.Tensor) -> Any:
    one = tape.gradient(losses[0], x)
    if "replica_0" in losses[0].name:
        return one, tape.gradient(losses[1], x)
    return one, one


@pytest.mark.parametrize("take", [_on_one_line, _only_on_the_sender])
def test_losses_that_cannot_be_told_apart_are_refused(take: Callable[..., Any]) -> None:
    with pytest.raises(
        replicator.MismatchError,
        match=r"(?s)A gradient of message 0 .*several linked losses are told apart",
    ):
        _apart(take)
