# SPDX-License-Identifier: Apache-2.0
"""What the rows of a tensor are, of those that have some for each example.

A sum over rows that were divided by the number of examples is a mean; one over rows of
which some were left out is still a sum, but their mean is none of the examples. Rows
that are made of more than their own example, as batch normalization makes them, are not
those of one device: that is found, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator.autodist import flows
from replicator.graph.ir.kinds import kind_of

HANDED_ON = (
    *("Identity", "Cast", "Reshape", "Squeeze", "ExpandDims", "Neg", "StopGradient"),
    *("CheckNumerics", "EnsureShape", "Snapshot", "PreventGradient"),
)
_ALIKE = ("Add", "AddV2", "AddN", "Sub", "Select", "SelectV2", "ConcatV2", "Pack")
_TIMES = ("Mul", "MulNoNan")
_OVER = ("RealDiv", "Div", "DivNoNan", "Xdivy")
_FILLED = ("Fill", "BroadcastTo", "Tile")
_REDUCED = ("Mean", "Sum", "Max", "Min")
NORMALIZED = ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
# Some rows are left out, or several become one: a sum over them stays what it is.
FILTERED, PICKED = "filtered", "picked"
_FILTERS = (
    *("Where", "Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"),
    *("ListDiff", "DynamicPartition", "BooleanMask"),
)
_SEGMENTS = ("SegmentSum", "UnsortedSegmentSum", "SegmentSumV2", "SparseSegmentSum")
_LOOKUPS = ("GatherV2", "Gather", "GatherNd", "ResourceGather", "ResourceGatherNd")


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is known of rows.

    Attributes:
        degree: By which power of the number of examples they were multiplied; None:
            that cannot be said.
        chosen: FILTERED if some rows are left out by what they are, PICKED if by where
            they are, else "".
        mixed: The first op that made them of more than their own example, if any did.
    """

    degree: int | None = 0
    chosen: str = ""
    mixed: tf.Operation | None = None


PLAIN = Rows()


class Finder:
    """Finds what rows are.

    Args:
        flow: What differs.
        has_rows: Whether a tensor that differs has rows of examples.
        power: Returns with which power of the number of examples a value without rows
            grows; None if that cannot be said.
        of_all: Whether a value without rows is computed of all examples.
        within: Returns what mixes examples in a function that an op calls, if any.
    """

    def __init__(
        self,
        flow: flows.Flow,
        has_rows: Callable[[tf.Tensor], bool],
        power: Callable[[tf.Tensor], int | None],
        of_all: Callable[[tf.Tensor], bool],
        within: Callable[[tf.Operation], tf.Operation | None],
    ) -> None:
        self._flow, self._has_rows, self._power = flow, has_rows, power
        self._of_all, self._within = of_all, within
        self._known: dict[tf.Operation, Rows] = {}

    def of(self, tensor: tf.Tensor) -> Rows:
        """Returns what is known of a tensor's rows."""
        if tensor.op not in self._known:
            differing, known = self._flow.differing, self._known
            for op in flows.upstream(
                [tensor], lambda op: op in known or op not in differing
            ):
                if op not in known:
                    self._known[op] = self._find(op)
        found = self._known[tensor.op]
        if tensor.op.type.startswith("Unique") and tensor.value_index == 1:
            return dataclasses.replace(found, chosen="")  # one for each example again
        return found

    def _find(self, op: tf.Operation) -> Rows:
        if op not in self._flow.differing:
            return PLAIN
        own: list[Rows] = []
        others: list[tf.Tensor] = []
        for tensor in op.inputs:
            if tensor.op not in self._flow.differing:
                continue
            if tensor.op in self._known and self._has_rows_or_chosen(tensor):
                own.append(self.of(tensor))
            elif tensor.dtype.is_floating or tensor.dtype.is_complex:
                others.append(tensor)
        before = [self._known.get(tensor.op, PLAIN).mixed for tensor in op.inputs]
        mixed = next(filter(None, before), None)
        if mixed is None and kind_of(op).calls:
            mixed = self._within(op)
        if mixed is None and self._mixes(op, own, others):
            mixed = op
        return Rows(self._degree(op, own, others), self._chosen(op, own), mixed)

    def _has_rows_or_chosen(self, tensor: tf.Tensor) -> bool:
        return self._has_rows(tensor) or bool(self._known[tensor.op].chosen)

    def _degree(
        self, op: tf.Operation, own: Sequence[Rows], others: Sequence[tf.Tensor]
    ) -> int | None:
        if op.type in _TIMES or op.type in _OVER:
            powers = [self._of_operand(tensor) for tensor in op.inputs]
            if None in powers:
                return None
            sign = 1 if op.type in _TIMES else -1
            return (powers[0] or 0) + sign * (powers[1] or 0)
        if op.type in _FILLED:
            value = op.inputs[1 if op.type == "Fill" else 0]
            return self._of_operand(value)
        degrees = {one.degree for one in own}
        if op.type in (*HANDED_ON, *_ALIKE, *_REDUCED, *_LOOKUPS) and len(degrees) == 1:
            return degrees.pop()
        return 0 if degrees <= {0} else None

    def _of_operand(self, tensor: tf.Tensor) -> int | None:
        if tensor.op not in self._flow.differing:
            return 0
        if self._has_rows(tensor):
            return self.of(tensor).degree
        return self._power(tensor)

    def _chosen(self, op: tf.Operation, own: Sequence[Rows]) -> str:
        if op.type in _FILTERS or op.type in _SEGMENTS:
            return FILTERED
        if op.type == "StridedSlice" and own and _picks(op):
            return PICKED
        if op.type in _LOOKUPS and op.inputs[1].op in self._flow.differing:
            # One row for each index, wherever the rows come from.
            looked_up = self._known.get(op.inputs[1].op, PLAIN)
            return self.of(op.inputs[1]).chosen if looked_up else ""
        found = {one.chosen for one in own} - {""}
        return PICKED if PICKED in found else FILTERED if found else ""

    def _mixes(
        self, op: tf.Operation, own: Sequence[Rows], others: Sequence[tf.Tensor]
    ) -> bool:
        """Whether an op makes rows of more than their own example."""
        if op not in self._flow.by_value:
            return False
        if op.type in NORMALIZED:
            return bool(op.get_attr("is_training"))
        if not own:
            return False
        counted = (*_TIMES, *_OVER)
        return any(
            (tensor.op in self._flow.by_value and self._of_all(tensor))
            or (op.type not in counted and self._power(tensor) != 0)
            for tensor in others
        )


def _picks(op: tf.Operation) -> bool:
    """Whether a slice leaves out rows by their places."""
    masks: Any = (op.get_attr("begin_mask"), op.get_attr("end_mask"))
    if op.get_attr("ellipsis_mask") & 1 or op.get_attr("new_axis_mask") & 1:
        return False
    begin = tf.get_static_value(op.inputs[1])
    starts = masks[0] & 1 or (begin is not None and len(begin) and begin[0] == 0)
    strides = tf.get_static_value(op.inputs[3])
    whole = strides is None or not len(strides) or strides[0] in (1, -1)
    return not (starts and masks[1] & 1 and whole)
