# SPDX-License-Identifier: Apache-2.0
"""The small programs of AutoDist's tests, as functions of whole batches."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tests.autodist import small
from tests.forms.programs import doors

W = np.array([[0.5, -0.3], [0.2, 0.7], [-0.4, 0.1]], np.float32)
B = np.array([0.1, -0.2], np.float32)
INITIAL: dict[str, list[Any]] = {
    "FETCHES": [],
    "WRITES": [np.float32(1), np.int32(2)],
    "LOSSES": [W, B],
    "WHOLE": [W, B],
}
SIZES = (5, 4, 2)  # even and uneven, on 2 and 3 replicas, and none for the last
SIGNATURE = [
    tf.TensorSpec([None, 3], tf.float32),
    tf.TensorSpec([None], tf.float32),
    tf.TensorSpec([None], tf.int32),
]


def _examples(n: int) -> list[tf.Tensor]:
    rng = np.random.default_rng(n)
    x = rng.standard_normal([n, 3])
    # Both signs on each replica, and no zeros.
    y = (np.abs(rng.standard_normal(n)) + 0.1) * (-1) ** np.arange(n)
    arrays = (x, y, np.arange(n) * 7 % 11)
    return [tf.cast(a, s.dtype) for a, s in zip(arrays, SIGNATURE, strict=True)]


def _step(table: str, name: str, variables: list[Any], *given: Any) -> Any:
    make = getattr(small, table)[name]
    if table == "FETCHES":
        return make(*given)
    if table == "WRITES":
        make(*variables, *given)
        return []
    with tf.GradientTape() as tape:
        loss = make(*given, *variables)
    slopes = tape.gradient(loss, variables)
    for v, slope in zip(variables, slopes, strict=True):
        if slope is not None:
            v.assign_sub(0.1 * tf.convert_to_tensor(slope))
    return loss


def _run(table: str, name: str, door: Any, num_replicas: int) -> list[Any]:
    """Returns what each call returns, and the variables behind it."""
    step = functools.partial(_step, table, name)

    def make():
        return [tf.Variable(one) for one in INITIAL[table]]

    variables, function = door(step, make, SIGNATURE, num_replicas)
    return [
        (
            tf.nest.map_structure(np.asarray, function(*_examples(n))),
            [v.numpy() for v in variables],
        )
        for n in SIZES
    ]


@functools.cache
def _expected(table: str, name: str) -> list[Any]:
    return _run(table, name, doors.one_device, 1)


@pytest.mark.battery(24)
@pytest.mark.parametrize(
    "table, name, num_replicas",
    [
        (table, name, 2 + (k + turn) % 2)
        for turn in range(2)
        for k, (table, name) in enumerate(
            (table, name) for table in INITIAL for name in getattr(small, table)
        )
    ],
)
@pytest.mark.parametrize("is_cut", [True, False], ids=["empty", "whole if few"])
def test_small_programs_compute_what_one_device_does(table, name, num_replicas, is_cut):
    door = doors.engine if is_cut else doors.few_are_whole
    actual, expected = _run(table, name, door, num_replicas), _expected(table, name)
    tf.nest.assert_same_structure(actual, expected)
    pairs = zip(tf.nest.flatten(actual), tf.nest.flatten(expected), strict=True)
    for a, b in pairs:
        assert np.shape(a) == np.shape(b)
        if np.asarray(b).dtype.kind in "OSU":
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
