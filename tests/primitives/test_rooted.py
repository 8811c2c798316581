# SPDX-License-Identifier: Apache-2.0
"""broadcast and scatter: what the root passes, specs, and who receives which rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from tests import helpers, sampling


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("sizes", [[3, 2], [None, 2], None], ids=str)
@pytest.mark.parametrize("what", ["broadcast", "scatter"])
def test_the_others_may_hand_in_specs(what: str, sizes: Any, mode: str) -> None:
    values = np.arange(6.0).reshape([3, 2])
    repl = helpers.make(3)

    def step() -> Any:
        if repl.replica_id == 1:
            value = {"x": helpers.opaque(values), "n": helpers.opaque([7, 8, 9])}
        else:
            spec = tf.TensorSpec(sizes, tf.float64)
            value = {"x": spec, "n": tf.TensorSpec([3], tf.int32)}
        received = getattr(repl, what)(value, root=1)
        assert received["x"].shape.is_compatible_with([3, 2] if what[0] == "b" else [2])
        return received

    result = helpers.run(mode, repl, lambda: step)
    for r, (x, n) in enumerate(zip(result["x"], result["n"], strict=True)):
        np.testing.assert_array_equal(x, values if what == "broadcast" else values[r])
        np.testing.assert_array_equal(n, [7, 8, 9] if what == "broadcast" else 7 + r)


@pytest.mark.battery(5)
@pytest.mark.parametrize(
    ("size", "static", "mode"),
    sampling.in_turn(
        [(7, 0), (7, -1), (2, 0), (0, 1)], [(), [None, None], None], helpers.MODES
    ),
    ids=str,
)
@pytest.mark.parametrize("what", ["scatter", "reduce_scatter"])
def test_the_first_ones_receive_one_row_more(
    what: str, size: tuple[int, int], static: Any, mode: str
) -> None:
    """As in NumPy's array_split; some receive none if there are few."""
    (rows, axis), shape = size, [5, 5]
    shape[axis] = rows
    values = np.random.RandomState(0).rand(3, *shape)
    repl = helpers.make(3)

    def step() -> tf.Tensor:
        x = helpers.opaque(values[repl.replica_id], static)
        if what == "reduce_scatter":
            y = repl.reduce_scatter(x, "max", axis)
        else:
            spec = tf.TensorSpec(x.shape, tf.float64)
            y = repl.scatter(spec if repl.replica_id else x, axis=axis)
        assert y.shape.is_fully_defined() == (static == ())
        return y

    whole = values[0] if what == "scatter" else values.max(0)
    want = np.array_split(whole, 3, axis)
    for result, own in zip(helpers.run(mode, repl, lambda: step), want, strict=True):
        np.testing.assert_array_equal(result, own)


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
