# SPDX-License-Identifier: Apache-2.0
"""The places where primitives are refused, and the errors there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensorflow as tf

import replicator
from tests import helpers
from tests.conformance.battery import CASES

Communicate = Callable[[tf.Tensor], tf.Tensor]


@pytest.mark.parametrize("name", CASES)
def test_outside_a_step(name: str) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        replicator.ContextError,
        match=r"(?s)outside a step.*\.py:\d+ in .*\nFix: .*step",
    ):
        CASES[name].call(_Anyone(repl), tf.constant([1.0]))


class _Anyone:
    """A Replicator for calls outside of a step, where there is no replica_id."""

    replica_id = 0

    def __init__(self, repl: replicator.Replicator) -> None:
        self._repl = repl

    def __getattr__(self, name: str) -> object:
        return getattr(self._repl, name)


def test_gradient_around_a_step_is_none() -> None:
    """It would be partial for variables; inside the step, gradients are complete."""
    repl = helpers.make(2)

    @tf.function
    def outside() -> tf.Tensor:
        x = tf.constant(1.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = repl.run(lambda: repl.all_reduce(x))
        assert tape.gradient(y[0], x) is None
        return y[0]

    assert float(outside()) == 2.0


def _assert_refused(
    mode: str, place: Callable[..., tf.Tensor], name: str, says: str
) -> None:
    """Also asserts that the next step is unaffected."""
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        x = helpers.opaque([[1.0, 2.0]] * 2)
        return place(lambda x: CASES[name].run(repl, x), x)

    with pytest.raises(
        replicator.ReplicatorError,
        match=rf"(?s)on replica 0 is {says}.*at tests.\w+.\w+.py:\d+ in .*Fix: ",
    ):
        helpers.run(mode, repl, lambda: step)
    after = helpers.run(mode, repl, lambda: lambda: repl.all_reduce(tf.constant(2.0)))
    assert list(after) == [4.0, 4.0]


def _init_scope(communicate: Communicate, x: tf.Tensor) -> tf.Tensor:
    with tf.init_scope():
        return communicate(tf.ones([2, 3]))


@pytest.mark.battery(3)
@pytest.mark.parametrize("name", CASES)
def test_in_an_init_scope(name: str) -> None:
    _assert_refused("function", _init_scope, name, r"in a tf\.init_scope")
