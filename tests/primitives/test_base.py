# SPDX-License-Identifier: Apache-2.0
"""Rules of all primitives: what is an operand, and where results are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests import helpers

CAPTURED = tf.range(1000.0)
OPERANDS = {
    "int": lambda: 3,
    "float": lambda: 3.0,
    "numpy": lambda: np.float32(3),
    "array": lambda: np.array([3.0, 3.0]),
    "tensor": lambda: tf.convert_to_tensor([3.0]),
    "captured": lambda: CAPTURED,
}


@pytest.mark.parametrize("name", OPERANDS)
@pytest.mark.parametrize("mode", helpers.MODES)
def test_numbers_and_arrays(name: str, mode: str) -> None:
    if name == "captured" and mode == "session":
        pytest.skip("a graph takes no eager tensors")
    repl = helpers.make(2)
    for y in helpers.run(mode, repl, lambda: lambda: repl.all_reduce(OPERANDS[name]())):
        np.testing.assert_array_equal(y, 2 * np.asarray(OPERANDS[name]()))


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather"])
def test_variables(name: str, mode: str) -> None:
    repl = helpers.make(2)

    def make_step() -> Callable[[], Any]:
        variable = tf.Variable([1.0, 2.0])
        return lambda: getattr(repl, name)(variable)

    want = {"all_reduce": [2.0, 4.0], "broadcast": [1.0, 2.0]}
    for y in helpers.run(mode, repl, make_step):
        np.testing.assert_array_equal(y, want.get(name, [[1.0, 2.0]] * 2))


@pytest.mark.parametrize("mode", helpers.MODES)
def test_a_result_that_nobody_uses(mode: str) -> None:
    repl = helpers.make(2)

    def step() -> tf.Tensor:
        repl.all_reduce(helpers.opaque(1.0))
        repl.broadcast(helpers.opaque([1.0], None))
        return repl.all_gather(repl.replica_id)

    for y in helpers.run(mode, repl, lambda: step):
        np.testing.assert_array_equal(y, [0, 1])


def test_results_lie_on_the_devices_of_their_replicas() -> None:
    repl = helpers.make(3)

    def step() -> Any:
        x = helpers.opaque(1.0)
        return repl.all_reduce(x), repl.broadcast(x, 1), repl.all_gather(x)

    with tf.Graph().as_default():
        for column in repl.run(step):
            assert tuple(y.device for y in column) == repl.devices
