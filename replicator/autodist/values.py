# SPDX-License-Identifier: Apache-2.0
"""Infers how tensors of a graph depend on splitting the examples over replicas.

Walks from a tensor back to the ops that compute it, into functions, conditionals and
loops, too. The rules for rows are in rows.py, those for other Values in kinds.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf
from replicator.autodist import (
    flows,
    kinds,
    lengths,
    own_gradients,
    powers,
    pulled,
    rows,
    tables,
    turns,
    uses,
    wholes,
)
from replicator.autodist.kinds import (
    DRAWN,
    SAME,
    SIZES,
    STATISTIC,
    UNKNOWN,
    Kind,
    Value,
)
from replicator.autodist.sizes import Sizes
from replicator.graph.ir import placeholder, switching
from replicator.graph.ir.kinds import ENTERS, EXITS, MERGES, NEXT, chooses, kind_of

_PASSED = (*ENTERS, *EXITS, *NEXT, "LoopCond")
_SIZES = ("Shape", "ShapeN", "Size", "StridedSlice", "Prod", "Pack", "ConcatV2")
_GIVES_ROWS = (tf.resource, tf.variant)


class Values:
    """Infers the `Value` of each tensor of a graph.

    Args:
        flow: Which of the graph's ops differ between replicas.
        called: Whether the graph is a function's, whose ops cannot be rewired.
        dealt: Whether elements that functions pull may be dealt to the replicas.
    """

    def __init__(
        self, flow: flows.Flow, called: bool = False, dealt: bool = True
    ) -> None:
        self._flow, self._is_called, self._are_dealt = flow, called, dealt
        self._known: dict[tf.Tensor, Value] = {}
        self._called: dict[tf.Operation, list[Value]] = {}
        self._sizes = Sizes(self.of)
        self._rows = rows.Rows(self._sizes, self._is_data)
        # The assumed Value of each loop-carried Merge, until an iteration confirms it.
        self._assumed: dict[tf.Operation, Value] = {}

    def of(self, tensor: tf.Tensor) -> Value:
        """Returns the Value of a tensor."""
        key = tensor.ref()
        if key in self._known:
            return self._known[key]
        while not self._look(tensor):
            self._known.clear()  # an assumption about a loop was wrong
        return self._known[key]

    def is_given(self, tensor: tf.Tensor) -> bool:
        """Whether a tensor is a replica's part of the examples, as it came in."""
        return id(tensor) in self._flow.given and self.of(tensor).kind is Kind.ROWS

    def not_kept(self, results: Sequence[tf.Tensor]) -> tf.Operation | None:
        """Returns an op whose custom gradient may differ from that of one device.

        None if no op behind the results has one. Functions called by ops that differ
        are checked when the Values of their results are inferred.
        """
        return own_gradients.first_not_kept(
            results, self._flow.differing, self.of, self._computed_in, self._of_body
        )

    @property
    def control(self) -> switching.Flow:
        """The conditionals and loops that are ops of the graph itself."""
        return self._flow.control

    def follows_gradient(self, op: tf.Operation) -> bool:
        """Whether an op depends on a gradient that is not yet summed over replicas."""
        reduced = ("PlaceholderWithDefault", placeholder.TYPE)
        upstream = flows.upstream(op.inputs, lambda one: one.type in reduced)
        return any(
            op_before.name.rpartition("/")[2].startswith("grad_ys_")
            or _tf.begins_tape(op_before)
            for op_before in upstream
        )

    def _look(self, tensor: tf.Tensor) -> bool:
        """Infers the Values of a tensor and of all before it; False to begin again."""
        given, differing = self._flow.given, self._flow.differing

        def stops(op: tf.Operation) -> bool:
            if op not in differing:
                return True
            return all(t.ref() in self._known or id(t) in given for t in op.outputs)

        merges = []
        for op in turns.ordered(tensor, stops, self._flow.control):
            for k, result in enumerate(op.outputs):
                if result.ref() not in self._known:
                    self._known[result.ref()] = self._find(op, k, result)
            if op.type in MERGES:
                merges.append(op)
        for op in merges:
            value = self._merged(op)
            assumed = self._assumed.get(op)
            if assumed is not None and value != assumed:
                self._assumed[op] = turns.in_turns(assumed, value, turns.is_list(op))
                return False
        return True

    def _find(self, op: tf.Operation, k: int, tensor: tf.Tensor) -> Value:
        if id(tensor) in self._flow.given:
            value: Value = self._flow.given[id(tensor)]
            return value
        if op not in self._flow.differing:
            return SAME
        if op.type in MERGES:
            return self._first_merged(op) if k == 0 else UNKNOWN
        if not any(t.op in self._flow.differing for t in op.inputs):
            if self._are_dealt and kind_of(op).calls and pulled.pulls(op):
                return self._of_call(op, k, [SAME] * len(op.inputs))
            return self._given(op, k, tensor)
        values = [self._known.get(t.ref(), SAME) for t in op.inputs]
        if op.type in ("Switch", "RefSwitch"):
            if kinds.is_same(values[1]) or (k and op.inputs[1].op.type == "LoopCond"):
                return values[0]
            return turns.ended(values[0], lengths.of_switch(op, self._is_known_same))
        if op.type in _PASSED:
            return values[0]
        if op.type == "IdentityN":
            closed = any(wholes.is_closed(op, k, whole) for whole in values[k].wholes)
            return UNKNOWN if closed else values[k]
        if op.type == "EnsureShape" and op.inputs[0].op.type in tables.BELIEVED:
            before = [self._known.get(t.ref(), SAME) for t in op.inputs[0].op.inputs]
            return rows.believed(tensor, before)
        if op.type.startswith(("TensorList", "TensorArray")):
            return turns.of_list(op, values)
        if kind_of(op).calls and op.type not in tables.BELIEVED:
            return self._of_call(op, k, values)
        if op.type in _SIZES or (
            tensor.dtype.is_integer and any(v.kind is Kind.SIZES for v in values)
        ):
            size = self._size(op, tensor)
            if size is not None:
                return size
        if any(v.kind in (Kind.ROWS, Kind.PLACES) for v in values):
            return self._rows.find(op, k, values)
        return self._computed(op, k, values)

    def _given(self, op: tf.Operation, k: int, tensor: tf.Tensor) -> Value:
        """Returns the Value of an op that itself makes replicas differ."""
        if op.type in tables.SHAPED or flows.draws(op):
            if op.type in tables.SHAPED:
                return self._rows.find(op, k, [SAME] * len(op.inputs))
            return DRAWN
        if tensor.dtype in _GIVES_ROWS or tensor.shape.rank == 0:
            return UNKNOWN
        return Value(Kind.ROWS)

    def _size(self, op: tf.Operation, tensor: tf.Tensor) -> Value | None:
        """Returns the Value of a size, or of a shape whose elements are alike."""
        if op.type == "Size":
            elements = self._sizes.of_shape(op.inputs[0])
            value = self.of(op.inputs[0])
            if value.kind is Kind.ROWS and value.some is not None:
                return Value(Kind.MEAN, 1)
            if elements is None or None in elements:
                return None
            powers = [size[0] for size in elements if isinstance(size, tuple)]
            return Value(Kind.SAME, sum(powers), by_value=False)
        source = op.inputs[0]
        if op.type == "StridedSlice" and source.op.type == "Shape":
            value = self.of(source.op.inputs[0])
            begin = tf.get_static_value(op.inputs[1])
            if value.kind is Kind.ROWS and value.some is not None and begin is not None:
                if begin.tolist() == [value.axis] and not tensor.shape.rank:
                    return Value(Kind.MEAN, 1)  # differs per example
        elements = self._sizes.computed(tensor)
        if elements is None or None in elements:
            return None
        powers = [size[0] if isinstance(size, tuple) else 0 for size in elements]
        if not powers or len(set(powers)) > 1:
            return SIZES
        return Value(Kind.SAME, powers[0], by_value=False)

    def _computed(self, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
        """Returns the Value of an op none of whose operands has rows."""
        operands = kinds.alone(values)
        result = self._without_rows(op, k, operands)
        if result.kind in (Kind.STATISTIC, Kind.UNKNOWN, Kind.MIXED):
            result = self._of_whole(op, k, operands) or result
        return kinds.made_of(result, values)

    def _of_whole(self, op: tf.Operation, k: int, values: list[Value]) -> Value | None:
        """Returns the Value of an op that is given data of the whole batch.

        None if that does not help.
        """
        data = [
            n
            for n, value in enumerate(values)
            if not kinds.is_same(value) and self._is_data(op, n, wholes.STOPS)
        ]
        if op.type not in tables.ELEMENTWISE or not data:
            return None
        power = 0.0
        if op.type in tables.OVER and values[0].kind is Kind.MEAN and data[-1] == 1:
            data, power = [1], values[0].power
        elif all(kinds.is_same(v) or n in data for n, v in enumerate(values)):
            # Nothing here is trained, so the result itself becomes that of the whole
            # batch where it is used.
            if not any(wholes.is_trained(tensor) for tensor in op.inputs):
                return None
        for n in data:
            values = [*values[:n], SAME.replaced(power=power), *values[n + 1 :]]
        result = self._without_rows(op, k, values)
        if result.kind not in (Kind.SAME, Kind.MEAN):
            return None
        wholes_needed = frozenset(wholes.Whole(op, n, power) for n in data)
        return result.replaced(wholes=wholes_needed)

    def _is_data(self, op: tf.Operation, index: int, stops: Sequence[str] = ()) -> bool:
        """Whether an operand may be of the whole batch: nothing trains through it."""
        if self._is_called or not wholes.may_be(op, index, self._flow.control):
            return False
        return not wholes.is_trained(op.inputs[index], stops)

    def _without_rows(self, op: tf.Operation, k: int, values: list[Value]) -> Value:
        type_, first = op.type, values[0]
        if type_ in tables.ADDED:
            summands = [
                value
                for value, tensor in zip(values, op.inputs, strict=True)
                if not kinds.is_same(value) or not powers.is_zero(tensor)
            ]
            if type_ == "Sub" and summands and summands[-1] is values[1]:
                summands[-1] = kinds.negated(summands[-1])
            return kinds.added(summands)
        if type_ in tables.TIMES:
            return kinds.multiplied(*values)
        if type_ in tables.OVER:
            return kinds.divided(first, values[1])
        if type_ == "Neg":
            return kinds.negated(first)
        if type_ in tables.PASSED_ON or type_ in _MOVED:
            if not all(map(kinds.is_same, values[1:])):
                return UNKNOWN
            return kinds.cast(op, first) if type_ == "Cast" else first
        if type_ in ("Pack", "ConcatV2"):
            return kinds.together(values[: len(values) - (type_ == "ConcatV2")])
        if type_ in ("Select", "SelectV2") and kinds.is_same(first):
            return kinds.joined(*values[1:])
        if type_ in ("Sum", "Mean") and kinds.is_same(values[1]):
            rounded = type_ == "Mean" and op.outputs[0].dtype.is_integer
            if first.kind in (Kind.SAME, Kind.MEAN, Kind.DRAWN):
                return STATISTIC if rounded and not kinds.is_same(first) else first
        if type_ in ("MatMul", "BatchMatMulV2") and len(values) == 2:
            return kinds.multiplied(*values)
        if type_ in tables.SHAPED or type_ in ("Tile", "Range", "StridedSliceGrad"):
            return self._rows.find(op, k, values)
        return powers.computed(op, values)

    def _is_known_same(self, tensor: tf.Tensor) -> bool:
        is_known = kinds.is_same(self._known.get(tensor.ref(), UNKNOWN))
        return is_known or tensor.op not in self._flow.differing

    # --- Control flow -----------------------------------------------------------------

    def _first_merged(self, op: tf.Operation) -> Value:
        """Returns the Value of a Merge: of branches, or what is assumed for a loop."""
        is_loop = any(tensor.op.type in NEXT for tensor in op.inputs)
        if not is_loop:
            return self._merged(op)
        if op not in self._assumed:
            entering = next(t for t in op.inputs if t.op.type not in NEXT)
            self._assumed[op] = self._known.get(entering.ref(), SAME)
        return self._assumed[op]

    def _merged(self, op: tf.Operation) -> Value:
        values = [
            SAME
            if t.op not in self._flow.differing
            else self._known.get(t.ref(), UNKNOWN)
            for t in op.inputs
        ]
        if turns.is_list(op):
            values = [v for v in values if not kinds.is_same(v)] or values
        result = functools.reduce(kinds.joined, values)
        tests = self._flow.control.deciders(op) or ()
        test_values = (self._known.get(test.ref(), SAME) for test in tests)
        return result if all(map(kinds.is_same, test_values)) else UNKNOWN

    def _of_call(self, op: tf.Operation, k: int, values: Sequence[Value]) -> Value:
        """Returns the Value of a result of a function, a conditional or a loop."""
        if op not in self._called:
            self._called[op] = self._results(op, list(values))
        results = self._called[op]
        return results[k] if k < len(results) else UNKNOWN

    def _results(self, op: tf.Operation, values: list[Value]) -> list[Value]:
        if op.type in uses.LOOPS:
            return self._after_loop(op, values)
        test = SAME
        if chooses(op):
            test, *values = values
        elif op.type not in uses.FUNCTIONS:
            return []
        bodies = [body for _, body in _tf.called_graphs(op)]
        body_results = [self._of_body(body, values, body.outputs) for body in bodies]
        if not body_results:
            return []
        columns = list(zip(*body_results, strict=False))
        if not kinds.is_same(test):
            return [UNKNOWN] * len(columns)
        return [functools.reduce(kinds.joined, column) for column in columns]

    def _after_loop(self, op: tf.Operation, values: list[Value]) -> list[Value]:
        """Returns the Values that a loop ends with, after any number of iterations."""
        names = [op.get_attr(name).name for name in ("cond", "body")]
        functions = [_tf.function_called(op, name) for name in names]
        if None in functions:
            return []
        (test, tested), (body, results) = (f for f in functions if f is not None)
        for _ in range(2 * len(Kind)):
            (test_value,) = self._of_body(test, values, tested)
            after = [
                turns.in_turns(before, result, tensor.dtype == tf.variant)
                for tensor, before, result in zip(
                    op.inputs, values, self._of_body(body, values, results), strict=True
                )
            ]
            if after == values:
                break
            values = after
        else:
            return []
        if kinds.is_same(test_value):
            return after
        variables = list(zip(test.inputs, body.inputs, strict=True))
        test_scope = self._inside(test, values, tested)
        loop = lengths.Loop(
            *(tested[0], op.inputs, variables, results),
            lambda t: kinds.is_same((test_scope if t.graph is test else self).of(t)),
        )
        return [turns.ended(value, (loop, k)) for k, value in enumerate(after)]

    def _computed_in(
        self, body: tf.Graph, values: Sequence[Value], results: Sequence[tf.Tensor]
    ) -> list[Value]:
        """Returns the Values of a function's results, which are not differentiated."""
        inside = self._inside(body, values, results)
        return [inside.of(tensor) for tensor in results]

    def _of_body(
        self, body: tf.Graph, values: Sequence[Value], results: Sequence[tf.Tensor]
    ) -> list[Value]:
        """Returns the Values of a function's results, given those of its arguments."""
        inside = self._inside(body, values, results)
        if inside.not_kept(results) is not None:
            return [UNKNOWN] * len(results)
        # Nothing outside can count the elements of a tensor in a function.
        result_values = [inside.of(tensor) for tensor in results]
        return [UNKNOWN if value.over is not None else value for value in result_values]

    def _inside(
        self, body: tf.Graph, values: Sequence[Value], results: Sequence[tf.Tensor]
    ) -> Values:
        """Returns what infers Values in a function, given those of its arguments."""
        argument_values = dict(zip(map(id, body.inputs), values, strict=False))
        source_kinds = {
            tensor.op: "value" if value.by_value else "shape"
            for tensor, value in zip(body.inputs, values, strict=False)
            if not kinds.is_same(value)
        }

        def differs(op: tf.Operation) -> bool:
            return flows.draws(op) or (self._are_dealt and pulled.pulls(op))

        flow = flows.flow(
            flows.upstream(results, lambda op: False),
            lambda op: source_kinds.get(op) or ("value" if differs(op) else ""),
            lambda op: False,
            given=argument_values,
        )
        return Values(flow, called=True, dealt=self._are_dealt)


_MOVED = frozenset(
    """Reshape ExpandDims Squeeze Transpose StridedSlice Slice GatherV2 Pad ReverseV2
    Unpack""".split()
)
