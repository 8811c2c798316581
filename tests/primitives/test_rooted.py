# SPDX-License-Identifier: Apache-2.0
"""Operands that only the root passes: specs, tensors, and mismatched shapes."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers


@pytest.mark.parametrize("what", ["broadcast", "scatter"])
def test_specs_on_the_root_are_refused(what: str) -> None:
    repl = helpers.make(2)
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)^{what} on replica 0 was given TensorSpec.*it is the root.*"
        r"at tests.*Fix: .*tensors",
    ):
        repl.run(lambda: getattr(repl, what)(tf.TensorSpec([2])))


@pytest.mark.parametrize("what", ["broadcast", "scatter"])
def test_specs_beside_tensors_are_refused(what: str) -> None:
    repl = helpers.make(2)

    def step() -> Any:
        x = tf.ones([2])
        return getattr(repl, what)([x, tf.TensorSpec([2]) if repl.replica_id else x])

    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)^{what} on replica 1 was given tensors and TensorSpecs.*Fix: ",
    ):
        repl.run(step)


@pytest.mark.parametrize("what", ["broadcast", "scatter", "recv"])
def test_what_is_no_nest_is_refused(what: str) -> None:
    repl = helpers.make(2)
    keys_without_order = {1: tf.TensorSpec([2]), "a": tf.TensorSpec([2])}
    with pytest.raises(
        errors.ArgumentError,
        match=rf"(?s)^{what} on replica 0 .*not a nest of tensors.*at tests.*Fix: ",
    ):
        repl.run(lambda: getattr(repl, what)(keys_without_order, 1))


@pytest.mark.parametrize("known", [0, 1, None])
@pytest.mark.parametrize("what", ["broadcast", "scatter"])
def test_a_tensor_like_what_is_to_come_is_compared(
    what: str, known: int | None
) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        r = repl.replica_id
        x = tf.ones([2, 3 + r])
        return getattr(repl, what)(helpers.opaque(x, () if r == known else None))

    with pytest.raises(tf.errors.InvalidArgumentError):
        repl.run(step)
