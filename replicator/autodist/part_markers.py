# SPDX-License-Identifier: Apache-2.0
"""The gradients of variables in parts: markers of the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tensorflow as tf

from replicator import _tf
from replicator.autodist import marked
from replicator.autodist.cuts import Cut
from replicator.autodist.rewriting import Rewriter, joined
from replicator.autodist.taken import Gradient
from replicator.graph.passes import rows


class Markers:
    """Puts markers for parts in the places of those of a variable.

    Args:
        cuts: How variables are divided, by their names.

    Attributes:
        made: The gradients of the parts, by the first marker of the whole's.
    """

    def __init__(self, cuts: Mapping[str, Cut]) -> None:
        self._cuts = cuts
        self.made: dict[tf.Operation, list[Gradient]] = {}
        self._values: tf.Operation | None = (
            None  # of a gradient of which the rest comes
        )

    def has(self, op: tf.Operation) -> bool:
        """Whether an op is the marker of a gradient of what is divided."""
        return marked.text(op, marked.GRADIENT) in self._cuts

    def divide(self, made: Rewriter, op: tf.Operation) -> tf.Operation | None:
        """Returns what is in the place of a marker, None if that is yet to come.

        Args:
            made: Copies the graph.
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
        own = [
            _marker(piece, cut.shape_of(k), op, cut.names[k])
            for k, piece in enumerate(made.pieces.of(gradient, cut))
        ]
        self.made[op] = [
            Gradient(name, (one.op,)) for name, one in zip(cut.names, own, strict=True)
        ]
        value = joined(own, cut, op.name)
        made.pieces.note(value, cut, own)
        return value.op

    def _divide_rows(self, made: Rewriter, op: tf.Operation, cut: Cut) -> tf.Operation:
        """Does so with the rows of a sparse gradient, at the marker of the indices."""
        first = self._values
        assert first is not None, "values come before their indices"
        values, indices = made.tensor(first.inputs[0]), made.tensor(op.inputs[0])
        values = tf.reshape(values, [-1, *cut.shape[1:]])
        indices = tf.reshape(indices, [-1])
        found = []
        for k, (own, places) in enumerate(made.pieces.rows_of(values, indices, cut)):
            name = cut.names[k]
            one = _marker(own, [None, *cut.shape_of(k)[1:]], first, name)
            two = _marker(places, [None], op, name)
            found.append((one, two))
            gradient = Gradient(name, (one.op, two.op))
            self.made.setdefault(first, []).append(gradient)
        value = joined([one for one, _ in found], cut, first.name)
        which = found[0][1] if cut.axis else _of_whole([two for _, two in found], cut)
        with tf.name_scope(""):
            which = tf.identity(which, name=op.name)
        made.pieces.note_rows((value, which), found)
        made.become(first, value.op)
        return which.op


def _of_whole(indices: list[tf.Tensor], cut: Cut) -> tf.Tensor:
    """Returns which rows of the whole those of the parts are."""
    pairs = zip(indices, rows.offsets_of(cut.sizes), strict=True)
    return tf.concat([own + tf.constant(at, own.dtype) for own, at in pairs], 0)


def _marker(
    tensor: tf.Tensor, shape: Sequence[int | None], like: tf.Operation, name: str
) -> tf.Tensor:
    """Returns what passes on a gradient of a part, and says so."""
    known = tf.TensorShape(shape)
    marker = tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=known)
    for key in (marked.TAKEN, marked.LOSS, marked.PART):
        _tf.set_text_attr(marker.op, key, marked.text(like, key) or "")
    _tf.set_text_attr(marker.op, marked.GRADIENT, name)
    return marker
