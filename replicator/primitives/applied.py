# SPDX-License-Identifier: Apache-2.0
"""Finds the communication that gradients pass through on their way to an optimizer.

A gradient that an optimizer applies was computed by one call of tape.gradient, or of
tf.gradients: one pass over the ops of a loss, backwards. The calls made in that pass
are the gradient's own. The pass also uses values of the forward pass, and another
gradient may be among them: that of an adversary, a penalty, or an inner step. It is a
number like any other there, so the walk back through the graph ends at the values that
a pass uses.

It goes on through a value only if that is itself passed on as a gradient: among the
`output_gradients` of the pass, or the other factor of a product, as in
`tf.reduce_sum(hidden * tf.stop_gradient(gradient))`.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import tensorflow as tf

from replicator._tf import callers, functions, tapes
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.matching import control_flow

# Ops whose results are linear in each of their operands: what a gradient may pass
# through between two passes and still be one. A sum is one if all of its terms are.
_LINEAR = frozenset(
    "BatchMatMul BatchMatMulV2 BatchMatMulV3 BroadcastTo Cast ConcatV2 Einsum "
    "ExpandDims GatherNd GatherV2 Identity IdentityN MatMul Mean Mul MulNoNan Neg Pack "
    "PreventGradient RealDiv Reshape ResourceGather Slice Split SplitV Squeeze "
    "StopGradient StridedSlice Sum TensorListFromTensor TensorListGetItem "
    "TensorListPushBack TensorListSetItem TensorListStack Tile Transpose "
    "Unpack".split()
)
_SUMS = frozenset(("AddN", "AddV2", "Add", "Sub"))
# Primitives that only move their operands: a gradient remains a gradient.
_MOVES = frozenset(("all_gather", "all_to_all", "broadcast", "permute"))
_PRODUCTS = frozenset(
    "BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum MatMul Mul MulNoNan".split()
)
# Ops that treat each element by itself, or only move elements, as a step does with a
# gradient before it combines it. Sums over examples are not among them.
_ELEMENTWISE = _SUMS | frozenset(
    "BroadcastTo Cast ConcatV2 ExpandDims GatherNd GatherV2 Identity IdentityN Mul "
    "MulNoNan Neg Pack PreventGradient RealDiv Reshape Select SelectV2 Slice Split "
    "SplitV Squeeze StopGradient StridedSlice Transpose Unpack "
    "UnsortedSegmentSum".split()
)
_SCALED = frozenset(("Mul", "MulNoNan", "RealDiv"))
# Of a value, they depend on the shape only.
_SHAPES = set("BroadcastGradientArgs OnesLike Rank Shape ShapeN Size ZerosLike".split())
# Results of passes by id, and whether they went through tf.stop_gradient.
Ends: TypeAlias = dict[int, tuple[tf.Tensor, bool]]


class PassedCalls(NamedTuple):
    """The keys of the calls that gradients are computed from.

    Attributes:
        certain: Those that gradients passed through, as far as the graph tells.
        unless_recorded: Those that they passed through unless a tape recorded their
            pass: in that case they are differentiated again and are part of a loss.
        read: The handles of variables whose values they are computed from.
    """

    certain: set[str]
    unless_recorded: set[str]
    read: list[tf.Tensor]


def passed_calls(gradients: Sequence[Any], combined: Container[int]) -> PassedCalls:
    """Returns the calls that applied gradients passed through.

    Args:
        gradients: Tensors, IndexedSlices or None.
        combined: The ids of tensors that are sums over the replicas already; what they
            are computed from needs no weights.
    """
    return _Walk(combined).passed_calls(gradients)


def gradients_in(
    values: Sequence[Any], combined: Container[int], examples: int | None
) -> list[tf.Tensor]:
    """Returns the gradients of which values consist: scaled, or added to others.

    Like gradients of variables, they have no axis of examples: a sum or a mean over
    examples is a value and no gradient, and so is a quotient by their number.

    Args:
        values: Tensors, IndexedSlices or None.
        combined: The ids of tensors that are sums over the replicas already.
        examples: The number of the replica's examples, if it is known statically.
    """
    return _Walk(combined).gradients_in(values, examples)


def is_upstream(tensor: tf.Tensor) -> bool:
    """Whether a tensor is computed from the upstream gradients of the running pass.

    Other tensors in a gradient function are values of the forward pass, or computed
    from them once more (tf.recompute_grad). False where no pass is running.
    """
    upstream = callers.output_gradients_of_pass()
    if upstream is None:
        return False
    upstream_ids = {id(x) for x in upstream if x is not None}
    pending, seen = [tensor], {id(tensor)}
    while pending:
        tensor = pending.pop()
        if id(tensor) in upstream_ids:
            return True
        op, graph = tensor.op, tensor.graph
        if op.type == "Placeholder" and graph.building_function:
            sources = [outer for outer, inner in graph.captures if inner is tensor]
        elif not tapes.is_part_of_pass(op) or op.type in _SHAPES:
            continue
        elif tapes.begins_pass(op):
            return True
        else:
            sources = list(op.inputs)
        new = [x for x in sources if tf.is_symbolic_tensor(x) and id(x) not in seen]
        seen.update(map(id, new))
        pending += new
    return False


class _Walk:
    """One walk back through the graph, from gradients to what they passed through."""

    def __init__(self, combined: Container[int]) -> None:
        self._combined = combined
        self._passes = _Passes()
        self._caller: dict[tf.Graph, tf.Operation] = {}
        self._captured: dict[tf.Graph, dict[int, tf.Tensor]] = {}
        self._keys: dict[bool, set[str]] = {False: set(), True: set()}
        self._read: list[tf.Tensor] = []
        self._ends_of: dict[int, Ends] = {}
        self._seen: dict[tuple[int, bool], tf.Tensor] = {}

    def passed_calls(self, gradients: Sequence[Any]) -> PassedCalls:
        """Walks from the gradients; see the function of this name."""
        tensors = tf.nest.flatten(list(gradients), expand_composites=True)
        pending = [(x, False) for x in tensors if tf.is_symbolic_tensor(x)]
        while pending:
            uses, root_passes = self._through(pending)
            pending = []
            for op, value, doubtful in uses:
                for end, stopped in self._ends(value).values():
                    if self._is_factor(op, value, end, root_passes):
                        pending.append((end, doubtful or not stopped))
        return PassedCalls(self._keys[False], self._keys[True], self._read)

    def gradients_in(
        self, values: Sequence[Any], examples: int | None
    ) -> list[tf.Tensor]:
        """Walks from values to the gradients in them; see the function of this name."""
        tensors = tf.nest.flatten(list(values), expand_composites=True)
        pending = [x for x in tensors if tf.is_symbolic_tensor(x)]
        seen: dict[int, tf.Tensor] = {}
        gradients = []
        while pending:
            tensor = pending.pop()
            if id(tensor) in seen or id(tensor) in self._combined:
                continue
            seen[id(tensor)] = tensor
            op = tensor.op
            if self._passes.of(op) is not None:
                gradients.append(tensor)
            elif op.type in _ELEMENTWISE:
                pending += _terms(tensor, examples)
            elif kind_of(op).calls or op.type == "Placeholder":
                pending += self._results(tensor) or self._sources(tensor)
        return gradients

    def _through(
        self, pending: list[tuple[tf.Tensor, bool]]
    ) -> tuple[list[tuple[tf.Operation, tf.Tensor, bool]], set[Any]]:
        """Walks back through what was done to gradients, and through their passes.

        Args:
            pending: Tensors, and whether they count as gradients only unless recorded.

        Returns:
            The values that passes use, with their ops; and the passes that begin from
            ones which the walk reached.
        """
        uses, root_passes = [], set()
        while pending:
            tensor, doubtful = pending.pop()
            if (id(tensor), doubtful) in self._seen:
                continue
            self._seen[id(tensor), doubtful] = tensor
            op = tensor.op
            pass_id = self._passes.of(op)
            if pass_id is not None and tapes.begins_pass(op):
                root_passes.add(pass_id)
                continue
            call = placeholder.read(op)
            if pass_id is None and id(tensor) in self._combined:
                continue
            if pass_id is None:
                if call is not None:
                    self._keys[doubtful].add(call.key)
                if op.type == "ReadVariableOp":
                    self._read.append(op.inputs[0])
                pending += [(x, doubtful) for x in self._sources(tensor)]
                continue
            calls = control_flow.calls_inside(op) if call is None else (call,)
            self._keys[doubtful].update(inner.key for inner in calls)
            for x in op.inputs:
                if self._passes.of(x.op) == pass_id:
                    pending.append((x, doubtful))
                elif op.type not in _SHAPES:
                    uses.append((op, x, doubtful))
        return uses, root_passes

    def _sources(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns what a tensor is computed from, inside functions and outside them."""
        op = tensor.op
        if op.type == "Placeholder":
            outer = self._outer(tensor)
            return [] if outer is None else [outer]
        results = self._results(tensor)
        if "While" in op.type:  # each iteration uses all results of the preceding one
            results = [x for output in op.outputs for x in self._results(output)]
        return [*op.inputs, *results]

    def _results(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors that a result is inside the functions its op calls."""
        op = tensor.op
        results: list[Any] = []
        for _, body in functions.called_graphs(op) if kind_of(op).calls else ():
            self._caller[body] = op
            if len(body.outputs) == len(op.outputs):
                results.append(body.outputs[tensor.value_index])
            else:
                results += body.outputs
        return [
            x for x in results if tf.is_symbolic_tensor(x) and x.graph is not op.graph
        ]

    def _outer(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the tensor that is passed as a function's parameter, if known."""
        graph: Any = tensor.graph
        if not graph.building_function:
            return None
        if graph not in self._captured:
            outer_by_id = {id(inner): outer for outer, inner in graph.captures}
            caller = self._caller.get(graph)
            if caller is not None:  # a conditional's first operand is its condition
                operands = list(caller.inputs)[len(caller.inputs) - len(graph.inputs) :]
                outer_by_id |= dict(zip(map(id, graph.inputs), operands, strict=False))
            self._captured[graph] = outer_by_id
        outer = self._captured[graph].get(id(tensor))
        return outer if tf.is_symbolic_tensor(outer) else None

    def _ends(self, value: tf.Tensor) -> Ends:
        """Returns the gradients that a value is a multiple of, if any."""
        pending: list[tuple[tf.Tensor, list[tf.Tensor] | None]] = [(value, None)]
        while pending:
            tensor, sources = pending.pop()
            if sources is not None:  # whose ends are known by now
                self._ends_of[id(tensor)] = self._joined(tensor, sources)
            elif id(tensor) not in self._ends_of:
                self._ends_of[id(tensor)] = {}  # in case of a loop
                sources = self._factors(tensor)
                pending += [(tensor, sources), *((x, None) for x in sources)]
        return self._ends_of[id(value)]

    def _factors(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors a value is linear in; none for a result of a pass."""
        op = value.op
        if self._passes.of(op) is not None:
            return []
        call, sources = placeholder.read(op), self._results(value)
        is_linear = op.type in _LINEAR or op.type in _SUMS or op.type == "Placeholder"
        if is_linear or (call is not None and call.primitive in _MOVES):
            sources = sources or self._sources(value)
        if op.type == "RealDiv":
            return sources[:1]
        return [sources[value.value_index]] if op.type == "IdentityN" else sources

    def _joined(self, value: tf.Tensor, sources: Sequence[tf.Tensor]) -> Ends:
        """Returns a value's gradients, from those of the tensors it is linear in."""
        op = value.op
        if self._passes.of(op) is not None:
            return {id(value): (value, False)}
        ends_of_sources = [self._ends_of[id(x)] for x in sources]
        if op.type in _SUMS and not all(ends_of_sources):
            return {}
        stops = op.type == "StopGradient"
        return {
            key: (end, stopped or stops)
            for ends in ends_of_sources
            for key, (end, stopped) in ends.items()
        }

    def _is_factor(
        self, op: tf.Operation, value: tf.Tensor, end: tf.Tensor, root_passes: set[Any]
    ) -> bool:
        """Whether a pass multiplies its own gradient by a value, and by nothing else.

        Args:
            op: The op of the pass.
            value: What it uses of the forward pass.
            end: The gradient that the value is.
            root_passes: The passes that begin from ones. Others begin from gradients
                that are passed to them, which a value may be, whatever its op.
        """
        if kind_of(op).calls:
            return True  # as far as this graph tells
        others = [x for x in op.inputs if x is not value]
        pass_id = self._passes.of(op)
        if pass_id in root_passes:
            if op.type not in _PRODUCTS:
                return False
            if not self._depends(others, lambda x: tapes.begins_pass(x.op), pass_id):
                return False
        return not self._depends(others, lambda x: x is end)

    def _depends(
        self,
        tensors: Sequence[tf.Tensor],
        on: Callable[[tf.Tensor], bool],
        within: Any = None,
    ) -> bool:
        """Whether any of the tensors is computed from a certain one.

        Args:
            tensors: The tensors.
            on: Whether a tensor is that one.
            within: The pass to stay in, if any.
        """
        pending = list(tensors)
        seen = set(map(id, pending))
        while pending:
            tensor = pending.pop()
            if within is not None and self._passes.of(tensor.op) != within:
                continue
            if on(tensor):
                return True
            if tensor.op.type in _SHAPES:
                continue
            new = [x for x in self._sources(tensor) if id(x) not in seen]
            seen.update(map(id, new))
            pending += new
        return False


def _terms(tensor: tf.Tensor, examples: int | None) -> list[tf.Tensor]:
    """Returns the operands of an _ELEMENTWISE op of which its result consists."""
    op, operands = tensor.op, list(tensor.op.inputs)
    if op.type in ("Select", "SelectV2"):
        return operands[1:]
    if op.type == "IdentityN":
        return [operands[tensor.value_index]]
    if op.type not in _SCALED:
        return operands
    first, second = operands
    if _is_fixed(second, examples):
        return [first]
    other = op.type != "RealDiv" and _is_fixed(first, examples)
    return [second] if other else []


def _is_fixed(factor: tf.Tensor, examples: int | None) -> bool:
    """Whether a factor is a constant or the value of a variable, as a loss scale is.

    One that is computed may be a number of examples; so may a constant.
    """
    while factor.op.type in ("Cast", "Identity", "RealDiv", "Reciprocal"):
        factor = factor.op.inputs[-1]
    value = tf.get_static_value(factor)
    if value is None:
        return factor.op.type == "ReadVariableOp"
    return not (examples and np.any(np.isclose(value, [examples, 1 / examples])))


class _Passes:
    """Identifies passes, by their graphs and the ops that they begin from."""

    def __init__(self) -> None:
        self._is_part: dict[tf.Operation, bool] = {}
        self._starts: dict[tf.Graph, list[int]] = {}

    def of(self, op: tf.Operation) -> Any:
        """Returns a key of the pass that an op is part of; None: it is in none.

        A pass that begins from given gradients has the key of the preceding pass.
        """
        if op not in self._is_part:
            self._is_part[op] = tapes.is_part_of_pass(op)
        if not self._is_part[op]:
            return None
        if op.graph not in self._starts:
            self._starts[op.graph] = tapes.pass_starts(op.graph)
        return op.graph, bisect.bisect(self._starts[op.graph], tapes.number_of(op))
