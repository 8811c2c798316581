# SPDX-License-Identifier: Apache-2.0
"""What is known of rows of examples, by the ops that made them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from replicator.autodist import flows, rows
from replicator.autodist.rows import FILTERED, PICKED, Rows

# Is given the examples' rows, and how many there are; makes other rows.
MADE: dict[str, tuple[Callable[[Any, Any], Any], Rows]] = {
    "as given": (lambda x, n: tf.nn.relu(x) + 1.0, Rows()),
    "divided": (lambda x, n: x / n, Rows(-1)),
    "divided and multiplied": (lambda x, n: n * (x / n), Rows(0)),
    "divided twice": (lambda x, n: tf.negative(x / n) / n, Rows(-2)),
    "two that were divided": (lambda x, n: x / n - tf.identity(x) / n, Rows(-1)),
    "one that was divided": (lambda x, n: x / n + x, Rows(None)),
    "a number for each": (lambda x, n: tf.fill(tf.shape(x), 1.0 / n), Rows(-1)),
    "filtered": (lambda x, n: tf.boolean_mask(x, x > 0.0), Rows(0, FILTERED)),
    "filtered and divided": (
        lambda x, n: tf.boolean_mask(x / n, x > 0.0),
        Rows(-1, FILTERED),
    ),
    "the first": (lambda x, n: x[:2], Rows(0, PICKED)),
    "every second": (lambda x, n: x[::2], Rows(0, PICKED)),
    "reversed": (lambda x, n: x[::-1], Rows()),
    "picked of filtered": (
        lambda x, n: tf.boolean_mask(x, x > 0.0)[1:],
        Rows(0, PICKED),
    ),
}


def _found(make: Callable[[Any, Any], Any]) -> Rows:
    """Returns what is found of rows that are made in a graph of their own."""
    with tf.Graph().as_default() as graph:
        given = tf.compat.v1.placeholder(tf.float32, [None])
        count = tf.cast(tf.shape(given)[0], tf.float32)
        made = make(given, count)
    flow = flows.flow(
        graph.get_operations(),
        lambda op: "value" if op is given.op else "",
        lambda op: False,
    )
    finder = rows.Finder(
        flow,
        has_rows=lambda tensor: tensor.shape.rank != 0 and tensor.dtype != tf.int32,
        power=lambda tensor: _power(tensor, count),
        of_all=lambda tensor: tensor.op.type in ("Mean", "Sum"),
        within=lambda op: None,
    )
    return finder.of(made)


def _power(tensor: tf.Tensor, count: tf.Tensor) -> int | None:
    if tensor is count:
        return 1
    if tensor.op.type == "RealDiv" and tensor.op.inputs[1] is count:
        return -1
    return 0


@pytest.mark.parametrize("name", MADE)
def test_what_becomes_of_rows(name: str) -> None:
    make, expected = MADE[name]
    found = _found(make)
    if expected.chosen:
        assert found.chosen == expected.chosen
    else:
        assert found == expected


def test_rows_of_more_than_their_own_example_are_told_by_the_op() -> None:
    found = _found(lambda x, n: tf.nn.relu((x - tf.reduce_mean(x)) / n))
    assert found.mixed is not None and found.mixed.type == "Sub"
    assert _found(lambda x, n: x - tf.constant(2.0)).mixed is None
