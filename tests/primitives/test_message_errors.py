# SPDX-License-Identifier: Apache-2.0
"""send and recv: errors while the step is built or when it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import replicator
from replicator import errors
from tests import helpers

SCALAR = tf.TensorSpec([])


def _ones(size: int) -> np.ndarray:
    return np.ones([size], np.float32)


# Replica 0's part, replica 1's part, and the error.
MISMATCHES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "no recv": (
        lambda repl: repl.send(1.0, 1),
        lambda repl: None,
        r"Message 0 from 0 to 1, tag 0, of replica 0 has no partner: send .*tag=0 "
        r"float32\[\] at LINE\..*replica 1: 0 calls\s+Fix: .*equally often",
    ),
    "no send": (
        lambda repl: None,
        lambda repl: repl.recv(tf.TensorSpec([2, None]), 0, tag=3),
        r"Message 0 from 0 to 1, tag 3, of replica 1 has no partner: recv .*tag=3 "
        r"float32\[2, \?\] at LINE\..*replica 0: 0 calls\s",
    ),
    "one send more": (
        lambda repl: (repl.send(1.0, 1), repl.send(1.0, 1)),
        lambda repl: repl.recv(SCALAR, 0),
        r"Message 1 from 0 to 1.* of replica 0 has no partner.*replica 1: 1 call, "
        r"the last one: recv .* at LINE\s",
    ),
    "one recv more": (
        lambda repl: repl.send(1.0, 1),
        lambda repl: (repl.recv(SCALAR, 0), repl.recv(SCALAR, 0)),
        r"Message 1 from 0 to 1.* of replica 1 has no partner.*replica 0: 1 call, "
        r"the last one: send .* at LINE\s",
    ),
    "tag": (
        lambda repl: repl.send(1.0, 1, tag=1),
        lambda repl: repl.recv(SCALAR, 0, tag=2),
        r"Message 0 from 0 to 1, tag 1, of replica 0 has no partner.*"
        r"with a different tag: replica 1 .*: recv .*tag=2 .* at LINE\s+Fix: "
        r".*same tag",
    ),
    "direction": (
        lambda repl: repl.send(1.0, 1),
        lambda repl: repl.send(1.0, 0),
        r"Message 0 from 0 to 1, tag 0, of replica 0 has no partner.*"
        r"with a different direction: replica 1 .*: send .* at LINE\s+Fix: ",
    ),
    "dtype": (
        lambda repl: repl.send(1, 1),
        lambda repl: repl.recv(SCALAR, 0),
        r"Message 0 from 0 to 1, tag 0, differs between replicas: not the same dtype "
        r"\(int32\[\] and float32\[\]\)\..*send .* at LINE\s.*recv .* at LINE\s+Fix: ",
    ),
    "shape": (
        lambda repl: repl.send(_ones(2), 1),
        lambda repl: repl.recv(_ones(1), 0),
        r"not the same shape \(float32\[2\] and float32\[1\]\)\..*LINE\s.*LINE\s",
    ),
    "rank": (
        lambda repl: repl.send(_ones(2), 1),
        lambda repl: repl.recv(tf.TensorSpec([None, None]), 0),
        r"not the same shape \(float32\[2\] and float32\[\?, \?\]\)",
    ),
    "number": (
        lambda repl: repl.send([1.0, 2.0], 1),
        lambda repl: repl.recv([SCALAR] * 3, 0),
        r"not the same number of tensors",
    ),
    "leaf": (
        lambda repl: repl.send([1.0, 2], 1),
        lambda repl: repl.recv([1.0, SCALAR], 0),
        r"not the same dtype of tensor 1 \(int32\[\] and float32\[\]\)",
    ),
    "place": (
        lambda repl: tf.cond(
            helpers.opaque(True), lambda: repl.send(1.0, 1) or 0, lambda: 0
        ),
        lambda repl: repl.recv(SCALAR, 0),
        r"different places in the control flow: inside a conditional on replica 0, at "
        r"the top level on replica 1\..*LINE\s.*LINE\s+Fix: ",
    ),
    "branch": (
        lambda repl: tf.cond(
            helpers.opaque(True), lambda: repl.send(1.0, 1) or 0.0, lambda: 0.0
        ),
        lambda repl: tf.cond(
            helpers.opaque(True), lambda: 0.0, lambda: repl.recv(SCALAR, 0)
        ),
        r"replica 0 makes a call at a place in the control flow where there is none of "
        r"replica 1: .*another branch.*LINE\s+Fix: .*same branches",
    ),
}


@pytest.mark.battery(5)
@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", MISMATCHES)
def test_messages_that_do_not_pair_name_the_lines(name: str, mode: str) -> None:
    one, two, message = MISMATCHES[name]
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        if repl.replica_id == 0:
            one(repl)
        elif repl.replica_id == 1:
            two(repl)
        return tf.constant(0.0)

    message = message.replace(
        "LINE", r"tests.primitives.test_message_errors\.py:\d+ in <lambda>"
    )
    with pytest.raises(errors.MismatchError, match=rf"(?s){message}"):
        helpers.run(mode, repl, lambda: step)


def _exchange(repl: replicator.Replicator, x: tf.Tensor) -> tf.Tensor:
    repl.send(x, 1 - repl.replica_id)
    return repl.recv(x, 1 - repl.replica_id)


@pytest.mark.parametrize("mode", helpers.MODES)
def test_branches_that_only_one_side_takes_are_an_error_of_the_step(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        taken = helpers.opaque(repl.replica_id == 0)
        x = helpers.opaque(1.0)
        return tf.cond(taken, lambda: _exchange(repl, x), lambda: x)

    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"(?s)disagree in a conditional .*send source=0 destination=1 "
        r"tag=0.*test_message_errors\.py:\d+ in _exchange",
    ):
        helpers.run(mode, repl, lambda: step)


@pytest.mark.parametrize("linked", [False, True])
def test_a_gradient_on_one_side_only_says_how_to_get_it_on_the_other(
    linked: bool,
) -> None:
    """It needs `linked` where one sends, and a watched tensor where one receives."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            if repl.replica_id == 0:
                repl.send(x, 1)
                loss = repl.linked(x) if linked else x
            else:
                loss = x + repl.recv(SCALAR if linked else x, 0)
        return tape.gradient(loss, x)

    with pytest.raises(
        errors.MismatchError,
        match=rf"(?s)A gradient of message 0 from 0 to 1, tag 0, of replica "
        rf"{0 if linked else 1} has no partner.*"
        r"Fix: .*repl\.linked\(loss\).*in place of the TensorSpec",
    ):
        repl.run(step)


# What replica 1 adds to its loss, of what it received and its own x.
UNUSED: dict[str, Callable[[tf.Tensor, tf.Tensor], Any]] = {
    "not used": lambda y, x: 0.0,
    "stopped": lambda y, x: x * tf.stop_gradient(y),
    "an integer": lambda y, x: tf.cast(tf.cast(y, tf.int32), tf.float32),
    "not in the loss": lambda y, x: (y * x, 0.0)[1],
}


def _by_graph(tape: tf.GradientTape, loss: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    return tf.gradients(loss, x)[0]


@pytest.mark.parametrize("differentiate", [tf.GradientTape.gradient, _by_graph])
@pytest.mark.parametrize("name", UNUSED)
def test_a_linked_message_that_no_loss_uses_has_a_way_out(
    name: str, differentiate: Callable[..., tf.Tensor]
) -> None:
    repl = helpers.make(2)

    def step(zero: Callable[[tf.Tensor], Any]) -> tf.Tensor:
        x = helpers.opaque([2.0, 5.0][repl.replica_id])
        with tf.GradientTape() as tape:
            tape.watch(x)
            if repl.replica_id == 0:
                repl.send(x, 1)
                loss = repl.linked(x**2)
            else:
                y = repl.recv(x, 0)
                loss = x + UNUSED[name](y, x) + zero(y)
        return differentiate(tape, loss, x)

    with pytest.raises(
        errors.MismatchError,
        match=r"(?s)A gradient of message 0 from 0 to 1, .*of replica 0 has no "
        r"partner.*Fix: .*does not depend on the received y, add tf\.reduce_sum\("
        r"tf\.reshape\(y, \[-1\]\)\[:0\]\) to it",
    ):
        repl.run(lambda: step(lambda y: 0.0))

    def nothing(y: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.reshape(y, [-1])[:0])

    assert float(nothing(tf.constant(np.inf))) == 0.0
    assert float(repl.run(lambda: step(nothing))[0]) == 4.0


@pytest.mark.parametrize("in_order", [True, False])
def test_linked_losses_are_differentiated_in_one_order(in_order: bool) -> None:
    """Replica 0 links the second loss with the message of the first."""
    repl = helpers.make(2)

    def step(zero: float | None) -> list[tf.Tensor]:
        x = helpers.opaque([2.0, 5.0][repl.replica_id])
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            if repl.replica_id == 0:
                repl.send(x, 1, tag=1)
                losses = [repl.linked(0.0)]
                repl.send(x, 1, tag=2)
                losses.append(repl.linked(0.0))
            else:
                first, second = repl.recv(x, 0, tag=1), repl.recv(x, 0, tag=2)
                added = 0.0 if zero is None else zero * first
                losses = [first**3, second**2 + added]
        if not in_order:
            losses.reverse()
        return [tape.gradient(loss, x) for loss in losses]

    with pytest.raises(errors.MismatchError, match="A gradient of message 0 from 0"):
        repl.run(lambda: step(None))
    expected = [12.0, 4.0] if in_order else [4.0, 12.0]
    assert [float(d[0]) for d in repl.run(lambda: step(0.0))] == expected
