# SPDX-License-Identifier: Apache-2.0
"""Pieces of tensors correspond to parts, and are found without joining these."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from replicator.autodist import pieces
from replicator.autodist.pieces import Pieces
from replicator.autodist.rewriting import joined
from tests.autodist.parts import CUTS, W

v1 = tf.compat.v1
Make = Callable[[tf.Tensor], tf.Tensor]
# From a tensor joined of parts; and whether each piece comes from one part alone.
MADE: dict[str, tuple[Make, bool]] = {
    "itself": (lambda w: w, True),
    "elements": (lambda w: tf.sqrt(2.0 * w + 1.0) - w * w, True),
    "and others": (lambda w: tf.tanh(w) * tf.ones([4, 2]), True),
    "none of it": (lambda w: tf.ones([4, 2]) * 3.0, False),
    "rows": (lambda w: tf.reverse(w, [0]) * 2.0, False),
    "a norm": (lambda w: w * tf.norm(w), True),
    "columns": (lambda w: w * tf.constant([1.0, 2.0]), False),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MADE)
def test_pieces_are_slices_computed_of_parts_where_they_can_be(
    name: str, cut: str
) -> None:
    (make, of_parts), own = MADE[name], CUTS[cut]
    with tf.Graph().as_default() as graph, v1.Session() as session:
        parts = tf.split(W, own.sizes, own.axis)
        whole = joined(parts, own)
        all_pieces = Pieces()
        all_pieces.note(whole, own, parts)
        tensor = make(whole)
        before = set(graph.get_operations())
        split = all_pieces.of(tensor, own)
        expected = np.split(session.run(tensor), np.cumsum(own.sizes)[:-1], own.axis)
        for one, two in zip(session.run(split), expected, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-6)
        assert all_pieces.of(tensor, own) is split  # cached
        new = [op for op in graph.get_operations() if op not in before]
        # Tensors that do not come from parts, such as ones, are split.
        cuts = [t for op in new if op.type.startswith("Split") for t in op.inputs]
        assert any(t is tensor for t in cuts) != of_parts


INDICES = np.array([3, 0, 3, 1])
VALUES = np.arange(8, dtype=np.float32).reshape(4, 2)


@pytest.mark.parametrize("cut", CUTS)
def test_rows_go_to_the_parts_that_have_them(cut: str) -> None:
    own = CUTS[cut]
    with tf.Graph().as_default(), v1.Session() as session:
        rows = Pieces().rows_of(tf.constant(VALUES), tf.constant(INDICES), own)
        actual = session.run(rows)
    _check_rows(actual, cut)


def _check_rows(found: list[tuple[np.ndarray, np.ndarray]], cut: str) -> None:
    own = CUTS[cut]
    whole = np.zeros(own.shape, np.float32)
    np.add.at(whole, INDICES, VALUES)
    expected = np.split(whole, np.cumsum(own.sizes)[:-1], own.axis)
    for k, (values, indices) in enumerate(found):
        part = np.zeros(own.shape_of(k), np.float32)
        np.add.at(part, indices, values)
        np.testing.assert_allclose(part, expected[k])


@pytest.mark.parametrize("cut", CUTS)
def test_rows_that_are_of_parts_are_computed_of_these(cut: str) -> None:
    own = CUTS[cut]
    with tf.Graph().as_default() as graph, v1.Session() as session:
        all_pieces = Pieces()
        values, indices = tf.constant(VALUES), tf.constant(INDICES)
        parts = all_pieces.rows_of(values, indices, own)
        all_pieces.note_rows((values, indices), parts)
        assert all_pieces.rows_of(values, indices, own) == parts
        unique, segments = tf.unique(indices)  # as optimizers sum repeated rows
        total = tf.math.unsorted_segment_sum(values * 0.5, segments, tf.size(unique))
        before = set(graph.get_operations())
        actual = all_pieces.rows_of(total * 2.0, unique, own)
        new = [op for op in graph.get_operations() if op not in before]
        assert not {"DynamicPartition", "SplitV"} & {op.type for op in new}
        actual = session.run(actual)
    _check_rows(actual, cut)
    assert all(len(set(places)) == len(places) for _, places in actual)


def test_an_op_is_repeated_with_its_attributes_in_its_place() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        with tf.control_dependencies([tf.no_op("before")]), tf.device("/CPU:0"):
            x = tf.constant([[1.0, 2.0]])
            product = tf.matmul(x, x, transpose_b=True, name="product")
        other = tf.constant([[3.0, 4.0]])
        new = pieces.repeated(product.op, [other, other], "again")
        assert session.run(new.outputs[0]).tolist() == [[25.0]]
    assert new.name == "again" and new.device == product.op.device
    assert new.get_attr("transpose_b")
    assert list(new.control_inputs) == list(product.op.control_inputs)
