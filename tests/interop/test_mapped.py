# SPDX-License-Identifier: Apache-2.0
"""What map_reduce's function returns is alike for all entries, and neutral elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from replicator import errors
from replicator.interop import mapped

REDUCED: dict[str, Any] = {
    **{"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum},
    "mean": np.add,  # of which only the sum is taken
}
VALUES: dict[str, Any] = {
    **{dtype: [[-3, 0], [5, 1]] for dtype in ("int32", "int64", "float32", "float16")},
    "float64": [[-np.inf, 0], [np.inf, 1]],
    "uint8": [[0, 255], [3, 4]],
}


@pytest.mark.parametrize("dtype", VALUES)
@pytest.mark.parametrize("op", REDUCED)
def test_neutral_elements_change_nothing(op: str, dtype: str) -> None:
    value = np.array(VALUES[dtype], dtype)
    found = mapped.neutral(tf.constant(value), op).numpy()
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    np.testing.assert_array_equal(REDUCED[op](value, found), value)


@pytest.mark.parametrize(("op", "reduce"), [("min", np.minimum), ("max", np.maximum)])
def test_so_do_those_of_truths(op: str, reduce: Any) -> None:
    value = np.array([True, False])
    found = mapped.neutral(tf.constant(value), op).numpy()
    np.testing.assert_array_equal(reduce(value, found), value)


def test_tapes_find_the_result_behind_its_neutral_element() -> None:
    x = tf.constant([2.0, 3.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = mapped.neutral(x, "sum")
    np.testing.assert_array_equal(tape.gradient(found, x), [0, 0])


@pytest.mark.parametrize(
    ("leaves", "is_alike"),
    [
        ([tf.zeros([2]), tf.zeros([])], True),
        ([tf.zeros([2])], False),
        ([tf.zeros([3]), tf.zeros([])], False),
        ([tf.zeros([2]), tf.zeros([], tf.int32)], False),
    ],
    ids=["alike", "fewer", "another shape", "another dtype"],
)
def test_results_of_other_kinds_are_refused(leaves: Any, is_alike: bool) -> None:
    first = [tf.ones([2]), tf.ones([])]
    if is_alike:
        mapped.check_equal_specs([first, leaves], [first, leaves])
        return
    with pytest.raises(
        errors.ArgumentError, match="(?s)map_reduce.*one dtype and shape"
    ):
        mapped.check_equal_specs([first, leaves], [first, leaves])


def test_shapes_that_are_known_need_no_comparison() -> None:
    known = [tf.ones([2])] * 2
    assert mapped.of_one_shape(known) is known
    with tf.Graph().as_default():
        alone = [tf.compat.v1.placeholder(tf.float32, [None])]
        assert mapped.of_one_shape(alone) is alone
