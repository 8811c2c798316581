# SPDX-License-Identifier: Apache-2.0
"""Adds one replica's communication: of gradients, and of writes that differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.autodist import joining, losses, marked, refusals, stamping
from replicator.autodist.divided import Divided
from replicator.autodist.gradient_calls import Gradient
from replicator.autodist.kinds import Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.shares import Plan, Shares, Write
from replicator.autodist.stamping import Places
from replicator.compressors import reducing, specs
from replicator.compressors.memory import Place
from replicator.primitives import all_reduce

_SUM = tf.VariableAggregation.SUM


class Agreement:
    """Adds one replica's communication to its copy.

    Args:
        program: The single-device graph.
        plan: Where replicas communicate.
        shares: How many examples each replica has.
        variables: ReplicatedVariables, by name.
        places: What the ops of the program are on each replica.
        n: The place of the replica.
        divided: The partitioned graph that the replica copies, if there is one.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        shares: Shares,
        variables: Mapping[str, Any],
        places: Sequence[Places],
        n: int,
        divided: Divided | None = None,
    ) -> None:
        self._divided = divided
        self._program, self._plan, self._shares = program, plan, shares
        self._variables, self._places, self._n = variables, places, n

    def reduce(self, group: Sequence[Gradient]) -> Places:
        """Reduces gradients together; returns the ops that their markers become."""
        places, reduced_ops = self._places[self._n], {}
        pieces = [part for gradient in group for part in self._pieces(gradient)]
        gradients = [gradient_part for _, gradient_part in pieces]
        reduced = self._summed([part.variable for part, _ in pieces], gradients)
        for (part, _), result in zip(pieces, reduced, strict=True):
            sparse = isinstance(result, tf.IndexedSlices)
            tensors = [result.values, result.indices] if sparse else [result]
            for op, tensor in zip(part.ops, tensors, strict=True):
                _tf.replace(places[op].outputs[0], tensor)
                if part.variable in self._program.variables:
                    # Fetches of the marker read an op with this as its only result.
                    single = tf.identity(tensor) if tensor.value_index else tensor
                    reduced_ops[op] = single.op
        return reduced_ops

    def _summed(self, names: Sequence[str], gradients: Sequence[Any]) -> Sequence[Any]:
        """Returns the sums over all replicas, compressed where the strategy asks."""
        variables = [self._variables[name] for name in names]
        policies = [variable.policy for variable in variables]
        compressors = [
            specs.compressor(name, variable.storage.synchronizer.compressor or None)
            for name, variable in zip(names, variables, strict=True)
        ]
        if not any(compressors):
            return all_reduce.combine(gradients, "sum", None, policies)
        members = context.require("a compressor").build.world.everyone
        # A dummy: these compressors are casts, which keep no state.
        place = Place(tf.Module(name="AutoDist"), "AutoDist")
        call = reducing.Call("sum", members, None, place)
        return reducing.reduce(call, gradients, compressors, policies)

    def _pieces(self, gradient: Gradient) -> list[tuple[Gradient, Any]]:
        """Returns this replica's weighted gradient, one per part if partitioned."""
        places, divided = self._places[self._n], self._divided
        weigh, pieces = self._weigher(gradient), []
        for part in [gradient] if divided is None else divided.gradients(gradient):
            inputs = [places[op].inputs[0] for op in part.ops]
            inputs[0] = weigh(inputs[0])
            sparse = len(inputs) > 1
            pieces.append((part, tf.IndexedSlices(*inputs) if sparse else inputs[0]))
        return pieces

    def _weigher(self, gradient: Gradient) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns what weights a gradient for the sum over all replicas."""
        op = gradient.ops[0]
        loss, is_weighted = self._plan.loss_behind(gradient)
        if is_weighted and loss.over is None:
            return lambda value: value
        is_split = self._program.is_split
        if is_split and not is_weighted and marked.text(op, marked.BACK):
            line = errors.line_of(op)
            raise refusals.given_gradients(f"variable {gradient.variable}", line)
        source = self._plan.source(op.inputs[0].op)
        weight = self._shares.weight(source, loss, self._places, self._n)

        def weigh(value: tf.Tensor) -> tf.Tensor:
            factor = tf.cast(weight, value.dtype)
            if not is_weighted:
                return tf.math.multiply_no_nan(value, factor)
            # A replica with nothing to divide by has NaN or infinite gradients.
            is_spoilt = tf.equal(factor, 0) & ~tf.math.is_finite(value)
            return tf.where(is_spoilt, tf.zeros_like(value), value)

        return weigh

    def agree(self, write: Write) -> None:
        """Makes the replicas' writes equal to what one device would write."""
        op, value = write.op, write.value
        copied, index = (op, 1) if self._divided is None else self._divided.value_of(op)
        copy = self._places[self._n][copied]
        operand = copy.inputs[index]
        dtype = operand.dtype
        original = self._program.variable_behind(op.inputs[0])
        assert original is not None, "it writes a variable"
        if original.aggregation == _SUM and op.type != "AssignVariableOp":
            value = losses.SUM
        reduction = {Kind.MAX: "max", Kind.MIN: "min"}.get(value.kind, "sum")
        is_linear = value.kind in (Kind.SAME, Kind.MEAN) and value.mixed is None
        if reduction == "sum" and not is_linear:
            whole = self._whole(op, value)
            if whole is not None:
                _tf.set_input(copy, index, tf.cast(whole, dtype))
                return
            if value.mixed is None:
                raise refusals.no_whole(
                    original.op.name, errors.line_of(op), value.said
                )
        if reduction == "sum":
            operand = self._part(op, operand, value)
        (agreed,) = all_reduce.combine([operand], reduction, None)
        if reduction == "sum" and agreed.dtype != dtype:
            agreed = tf.cast(tf.round(agreed), dtype)
        _tf.set_input(copy, index, agreed)

    def _part(self, op: tf.Operation, own: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns the replica's term in a value of all examples."""
        source = self._plan.source(op.inputs[1].op)
        power = value.power if value.kind in (Kind.SAME, Kind.MEAN) else 0
        weight = self._shares.weight(
            source, Value(Kind.MEAN, power), self._places, self._n
        )
        if own.dtype.is_floating or own.dtype.is_complex:
            return own * tf.cast(weight, own.dtype)
        if power != 1:
            return tf.cast(own, tf.float64) * tf.cast(weight, tf.float64)
        # Where nothing is split, all have weight 1/R: replica 0's value is enough.
        counts = weight >= 1 if self._n else weight > 0
        return tf.where(counts, own, tf.zeros_like(own))

    def _whole(self, op: tf.Operation, value: Value) -> tf.Tensor | None:
        """Returns the written value recomputed for all examples, or None."""
        cut = joining.cut(self._plan.kinds, op.inputs[1], rows=False, put=True)
        if cut is None or value.mixed is not None:
            return None
        return joining.again(cut, op.inputs[1], self._joined)

    def _joined(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns a value of all examples, reduced over the replicas."""
        local_value = stamping.of(self._places[self._n], tensor)
        value = self._plan.unweighed(tensor, value)

        def weight() -> tf.Tensor:
            mean = value.replaced(kind=Kind.MEAN)
            source = self._plan.source(tensor.op)
            return self._shares.weight(source, mean, self._places, self._n)

        return joining.of_all(value, local_value, weight)
