# SPDX-License-Identifier: Apache-2.0
"""Replaces the gradient markers of partitioned variables by those of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.autodist import marked
from replicator.autodist.cuts import Cut
from replicator.autodist.gradient_calls import Gradient
from replicator.autodist.rewriting import Rewriter, joined
from replicator.graph.passes import rows


class Markers:
    """Replaces the markers of variables by markers of their parts.

    Args:
        cuts: How variables are partitioned, by name.

    Attributes:
        made: The gradients of the parts, by the first marker of the whole.
    """

    def __init__(self, cuts: Mapping[str, Cut]) -> None:
        self._cuts = cuts
        self.made: dict[tf.Operation, list[Gradient]] = {}
        self._values: tf.Operation | None = None  # marker whose indices are yet to come

    def has(self, op: tf.Operation) -> bool:
        """Whether an op is a gradient marker of a partitioned variable."""
        return marked.text(op, marked.GRADIENT) in self._cuts

    def divide(self, made: Rewriter, op: tf.Operation) -> tf.Operation | None:
        """Returns the replacement of a marker; None if that comes with the next one.

        Args:
            made: The rewriter of the graph.
            op: The marker.
        """
        cut = self._cuts[marked.text(op, marked.GRADIENT) or ""]
        part = marked.text(op, marked.PART)
        if part == "values":
            self._values = op
            return None
        if part == "indices":
            return self._divide_rows(made, op, cut)
        gradient = made.tensor(op.inputs[0])
        if not gradient.shape.is_fully_defined():
            gradient = tf.reshape(gradient, cut.shape)
        part_markers = [
            _marker(piece, cut.shape_of(k), op, cut.names[k])
            for k, piece in enumerate(made.pieces.of(gradient, cut))
        ]
        self.made[op] = [
            Gradient(name, (part_marker.op,))
            for name, part_marker in zip(cut.names, part_markers, strict=True)
        ]
        value = joined(part_markers, cut, op.name)
        made.pieces.note(value, cut, part_markers)
        return value.op

    def _divide_rows(self, made: Rewriter, op: tf.Operation, cut: Cut) -> tf.Operation:
        """Replaces the markers of a sparse gradient, at that of the indices."""
        first = self._values
        assert first is not None, "values come before their indices"
        values, indices = made.tensor(first.inputs[0]), made.tensor(op.inputs[0])
        values = tf.reshape(values, [-1, *cut.shape[1:]])
        indices = tf.reshape(indices, [-1])
        part_rows = []
        for k, (part_values, places) in enumerate(
            made.pieces.rows_of(values, indices, cut)
        ):
            name = cut.names[k]
            values_marker = _marker(
                part_values, [None, *cut.shape_of(k)[1:]], first, name
            )
            indices_marker = _marker(places, [None], op, name)
            part_rows.append((values_marker, indices_marker))
            gradient = Gradient(name, (values_marker.op, indices_marker.op))
            self.made.setdefault(first, []).append(gradient)
        value = joined(
            [values_marker for values_marker, _ in part_rows], cut, first.name
        )
        whole_indices = (
            part_rows[0][1]
            if cut.axis
            else _of_whole([indices_marker for _, indices_marker in part_rows], cut)
        )
        with tf.name_scope(""):
            whole_indices = tf.identity(whole_indices, name=op.name)
        made.pieces.note_rows((value, whole_indices), part_rows)
        made.become(first, value.op)
        return whole_indices.op


def _of_whole(indices: list[tf.Tensor], cut: Cut) -> tf.Tensor:
    """Returns the indices, in the whole, of the rows of all parts."""
    pairs = zip(indices, rows.offsets_of(cut.sizes), strict=True)
    return tf.concat([local + tf.constant(at, local.dtype) for local, at in pairs], 0)


def _marker(
    tensor: tf.Tensor, shape: Sequence[int | None], like: tf.Operation, name: str
) -> tf.Tensor:
    """Returns a marker of a part's gradient."""
    static_shape = tf.TensorShape(shape)
    marker = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=static_shape)
    for key in (marked.TAKEN, marked.LOSS, marked.PART):
        _tf.set_text_attr(marker.op, key, marked.text(like, key) or "")
    _tf.set_text_attr(marker.op, marked.GRADIENT, name)
    return marker
