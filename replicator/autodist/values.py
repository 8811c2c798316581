# SPDX-License-Identifier: Apache-2.0
"""Finds what the values of a graph are when the examples are split over replicas.

It goes from a value to what that is computed from, into functions, conditionals and
loops, too; what the kinds of operands make of a result is in kinds.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from replicator import _tf
from replicator.autodist import flows, rows
from replicator.autodist import kinds as rules
from replicator.autodist.kinds import Kind
from replicator.graph.ir import shapes
from replicator.graph.ir.kinds import chooses, kind_of

_REDUCED = {
    "Mean": Kind.MEAN,
    "Sum": Kind.SUM,
    "Max": Kind.MAX,
    "Min": Kind.MIN,
    "All": Kind.MIN,
    "Any": Kind.MAX,
    "L2Loss": Kind.SUM,
}
# Their rows are not those of examples, however many there are.
_ROWS_OF_OTHERS = (
    *("Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"),
    *("Where", "ListDiff", "Range"),
)
_DEEPEST = 200  # ops between a value and what it is reduced from


class Values:
    """Finds the kinds of tensors of a graph.

    Args:
        flow: What of it differs between replicas.
    """

    def __init__(self, flow: flows.Flow) -> None:
        self._flow = flow
        self._known: dict[int, tuple[tf.Tensor, Kind]] = {}
        self._called: dict[tf.Operation, list[Kind]] = {}
        self._mixed: dict[tf.Operation, tf.Operation] = {}  # in what an op calls
        self._rows = rows.Finder(
            flow, self.has_rows, self._power, self._of_all, self._mixes
        )

    def of(self, tensor: tf.Tensor, depth: int = 0) -> Kind:
        """Returns the kind of a tensor."""
        known = self._known.get(id(tensor))
        if known is None:
            kind = Kind.UNKNOWN if depth > _DEEPEST else self._find(tensor, depth + 1)
            known = self._known[id(tensor)] = tensor, kind
        return known[1]

    def _find(self, tensor: tf.Tensor, depth: int) -> Kind:
        op = tensor.op
        if id(tensor) in self._flow.given:
            given: Kind = self._flow.given[id(tensor)]
            return given
        if op not in self._flow.differing:
            return Kind.SAME
        if self.has_rows(tensor):
            return Kind.ROWS
        if op.type in _REDUCED:
            return self._reduced(op, depth)
        if op.type in ("Size", "StridedSlice"):
            return self._size(op)
        if not any(tensor.op in self._flow.differing for tensor in op.inputs):
            return Kind.DRAWN if flows.draws(op) else Kind.UNKNOWN
        if kind_of(op).calls:
            return self._of_call(op, tensor.value_index, depth)
        return self._computed(tensor, [self.of(one, depth) for one in op.inputs])

    def _computed(self, tensor: tf.Tensor, kinds: Sequence[Kind]) -> Kind:
        """Returns the kind of a result, given those of what it is computed from."""
        op, found = tensor.op, Kind.UNKNOWN
        if op.type in rows.HANDED_ON:
            found = rules.handed_on(op, kinds[0])
        elif op.type in rules.ADDED:
            found = rules.added(op, kinds)
        elif op.type in rules.SCALED:
            found = rules.scaled(op.type, kinds)
        elif op.type in ("Select", "SelectV2") and kinds[0] is Kind.SAME:
            found = kinds[1] if kinds[1] is kinds[2] else Kind.UNKNOWN
        elif op.type == "Prod":
            found = self._product(op)
        elif op.type in rows.NORMALIZED:
            return Kind.MEAN if tensor.value_index in (1, 2) else Kind.UNKNOWN
        if found is Kind.UNKNOWN and kinds and set(kinds) <= rules.STATISTICS:
            return Kind.DRAWN if set(kinds) <= rules.ONLY_DRAWN else Kind.STATISTIC
        return found

    def has_rows(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor that differs is taken to have a row for each example."""
        given = self._flow.given.get(id(tensor))
        if given is not None:
            return given is Kind.ROWS
        shape = tensor.shape
        if not shape.rank or tensor.op.type in _ROWS_OF_OTHERS:
            return False
        size = shapes.sizes(tensor)[0]
        return size is None or size in self._flow.batches

    def mixed(self, tensor: tf.Tensor) -> tf.Operation | None:
        """Returns an op that makes rows of more than their own example, if one does.

        Args:
            tensor: What depends on such rows.
        """
        return self._rows.of(tensor).mixed

    def degree(self, tensor: tf.Tensor) -> int | None:
        """Returns by which power of the number of examples rows were multiplied."""
        return None if self.picks(tensor) else self._rows.of(tensor).degree

    def picks(self, tensor: tf.Tensor) -> bool:
        """Whether rows are some of a batch, by their places in it."""
        return self._rows.of(tensor).chosen == rows.PICKED

    def _mixes(self, op: tf.Operation) -> tf.Operation | None:
        """Returns an op of a function that an op calls which mixes examples, if any."""
        if op not in self._called:
            self._called[op] = self._results(op, 0)
        return self._mixed.get(op)

    def denominator(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the sum by which a ratio is divided; None if it is no such ratio."""
        while self.of(tensor) is Kind.RATIO:
            op = tensor.op
            kinds = [self.of(one) for one in op.inputs]
            if Kind.RATIO not in kinds:
                return op.inputs[1] if op.type in rules.SCALED else None
            tensor = op.inputs[kinds.index(Kind.RATIO)]
        return None

    def _of_all(self, tensor: tf.Tensor) -> bool:
        return self.of(tensor) is not Kind.DRAWN

    def _power(self, tensor: tf.Tensor) -> int | None:
        """Returns by which power of the number of examples a value grows, if known."""
        kind = self.of(tensor)
        if kind in rules.STATISTICS:
            return 0
        return {Kind.COUNT: 1, Kind.SHARE: -1}.get(kind)

    def _reduced(self, op: tf.Operation, depth: int) -> Kind:
        """Returns the kind of what a reduction makes of its input."""
        (value, *axes) = op.inputs
        kind = self.of(value, depth)
        made = _REDUCED[op.type]
        if kind is Kind.ROWS:
            axis = tf.get_static_value(axes[0]) if axes else 0
            rank = value.shape.rank
            first = rank is None or axis is None or not axes
            first = first or bool(np.isin(np.ravel(axis), (0, -rank)).any())
            return self._of_rows(op, value) if first else Kind.UNKNOWN
        if (
            made in (Kind.MEAN, Kind.SUM)
            and kind in rules.LINEAR
            and op.type != "L2Loss"
        ):
            return kind
        if kind in rules.STATISTICS:
            return kind if kind in (made, Kind.DRAWN) else Kind.STATISTIC
        return Kind.UNKNOWN

    def _of_rows(self, op: tf.Operation, value: tf.Tensor) -> Kind:
        """Returns the kind of what a reduction makes of rows."""
        made, own = _REDUCED[op.type], self._rows.of(value)
        if own.chosen == rows.PICKED or own.degree is None:
            return Kind.UNKNOWN
        if made is Kind.SUM and op.type != "L2Loss":
            if own.degree == 0 and value.op not in self._flow.by_value:
                return Kind.SUM if own.chosen else Kind.COUNT
            return {0: Kind.SUM, -1: Kind.MEAN}.get(own.degree, Kind.UNKNOWN)
        if made is Kind.MEAN and own.degree == 1:
            return Kind.SUM
        if own.degree or (made is Kind.MEAN and own.chosen):
            return Kind.UNKNOWN
        return made

    def _size(self, op: tf.Operation) -> Kind:
        """Returns the kind of a number that is taken from a shape."""
        source = op.inputs[0]
        if op.type == "Size":
            return self._rows_of(source)
        if source.op.type == "Cast":
            source = source.op.inputs[0]
        begin = tf.get_static_value(op.inputs[1])
        one = op.get_attr("shrink_axis_mask") == 1
        if source.op.type != "Shape" or begin is None or not one or len(begin) != 1:
            return Kind.UNKNOWN
        kind = self._rows_of(source.op.inputs[0])
        return kind if begin[0] == 0 or kind is Kind.UNKNOWN else Kind.SAME

    def _rows_of(self, tensor: tf.Tensor) -> Kind:
        """Returns the kind of the number of a tensor's rows."""
        if not self.has_rows(tensor):
            return Kind.UNKNOWN
        chosen = self._rows.of(tensor).chosen
        if chosen == rows.FILTERED:
            return Kind.SUM  # it differs from example to example
        return Kind.UNKNOWN if chosen else Kind.COUNT

    def _product(self, op: tf.Operation) -> Kind:
        """Returns the kind of a product of the sizes of a shape."""
        source = op.inputs[0]
        while source.op.type == "Cast":
            source = source.op.inputs[0]
        if source.op.type == "Shape":
            return self._rows_of(source.op.inputs[0])
        if source.op.type != "Pack":
            return Kind.UNKNOWN
        kinds = [self.of(one) for one in source.op.inputs]
        differing = [kind for kind in kinds if kind is not Kind.SAME]
        return differing[0] if differing == [Kind.COUNT] else Kind.UNKNOWN

    def _of_call(self, op: tf.Operation, k: int, depth: int) -> Kind:
        """Returns the kind of a result of a function, a conditional or a loop."""
        if op not in self._called:
            self._called[op] = self._results(op, depth)
        found = self._called[op]
        return found[k] if k < len(found) else Kind.UNKNOWN

    def _results(self, op: tf.Operation, depth: int) -> list[Kind]:
        kinds = [self.of(tensor, depth) for tensor in op.inputs]
        values = [tensor.op in self._flow.by_value for tensor in op.inputs]
        if op.type in ("While", "StatelessWhile"):
            return self._after_loop(op, kinds, values)
        if chooses(op):
            if kinds[0] is not Kind.SAME:
                return []
            kinds, values = kinds[1:], values[1:]
        elif op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
            return []
        bodies = [body for _, body in _tf.called_graphs(op)]
        made = [self._of_body(op, body, kinds, values) for body in bodies]
        return [
            one[0] if len(set(one)) == 1 else rules.joined(set(one))
            for one in zip(*made, strict=False)
        ]

    def _after_loop(
        self, op: tf.Operation, kinds: list[Kind], values: list[bool]
    ) -> list[Kind]:
        """Returns the kinds of what a loop ends with, from any number of turns."""
        names = [op.get_attr(name).name for name in ("cond", "body")]
        found = [_tf.function_called(op, name) for name in names]
        if None in found:
            return []
        (test, tested), (body, results) = (one for one in found if one is not None)
        for _ in range(len(Kind)):
            (go_on,) = self._of_body(op, test, kinds, values, tested)
            if go_on is not Kind.SAME:
                return []
            after = [
                one if one is two else rules.joined({one, two})
                for one, two in zip(
                    kinds, self._of_body(op, body, kinds, values, results), strict=True
                )
            ]
            if after == kinds:
                return kinds
            values = [
                own or kind not in (Kind.SAME, Kind.COUNT, Kind.SHARE)
                for own, kind in zip(values, after, strict=True)
            ]
            kinds = after
        return []

    def _of_body(
        self,
        op: tf.Operation,
        body: tf.Graph,
        kinds: Sequence[Kind],
        values: Sequence[bool],
        results: Sequence[tf.Tensor] | None = None,
    ) -> list[Kind]:
        """Returns the kinds of a function's results, given those of its arguments."""
        results = body.outputs if results is None else results
        given = dict(zip(map(id, body.inputs), kinds, strict=False))
        own = {
            tensor.op: "value" if value else "shape"
            for tensor, kind, value in zip(body.inputs, kinds, values, strict=False)
            if kind is not Kind.SAME
        }
        flow = flows.flow(
            flows.upstream(results, lambda op: False),
            lambda op: own.get(op) or ("value" if flows.draws(op) else ""),
            lambda op: False,
            batches=self._flow.batches,
            given=given,
        )
        inside = Values(flow)
        for tensor in results:
            mixed = inside.mixed(tensor)
            if mixed is not None:
                self._mixed[op] = mixed
        return [inside.of(tensor) for tensor in results]
