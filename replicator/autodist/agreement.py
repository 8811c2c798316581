# SPDX-License-Identifier: Apache-2.0
"""Where one replica's copy communicates: gradients, and writes of what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.autodist import joining, kinds, losses, marked, refusals
from replicator.autodist.kinds import Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.shares import Gradient, Plan, Shares, Write
from replicator.autodist.stamping import Places
from replicator.primitives import all_reduce

_SUM = tf.VariableAggregation.SUM


class Agreement:
    """Puts the communication of one replica into its copy.

    Args:
        program: The single-device graph.
        plan: Where replicas communicate.
        shares: How many examples each replica has.
        variables: The components of all variables, by the names of these.
        places: What the ops of the program are on each replica.
        n: The place of the replica.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        shares: Shares,
        variables: Mapping[str, Any],
        places: Sequence[Places],
        n: int,
    ) -> None:
        self._program, self._plan, self._shares = program, plan, shares
        self._variables, self._places, self._n = variables, places, n

    def reduce(self, group: Sequence[Gradient]) -> Places:
        """Reduces gradients that belong together; returns what their markers become."""
        places, made = self._places[self._n], {}
        gradients, policies = [], []
        for gradient in group:
            inputs = [places[op].inputs[0] for op in gradient.ops]
            inputs[0] = self._weighed(gradient, inputs[0])
            gradients.append(
                tf.IndexedSlices(*inputs) if len(inputs) > 1 else inputs[0]
            )
            policies.append(self._variables[gradient.variable].policy)
        reduced = all_reduce.combine(gradients, "sum", None, policies)
        for gradient, result in zip(group, reduced, strict=True):
            sparse = isinstance(result, tf.IndexedSlices)
            parts = [result.values, result.indices] if sparse else [result]
            for op, part in zip(gradient.ops, parts, strict=True):
                _tf.replace(places[op].outputs[0], part)
                # What is fetched of the marker is this.
                made[op] = tf.identity(part).op
        return made

    def _weighed(self, gradient: Gradient, value: tf.Tensor) -> tf.Tensor:
        """Returns a gradient as it counts in the sum of all replicas'."""
        op = gradient.ops[0]
        loss, begun = self._plan.loss_behind(gradient)
        if begun and loss.over is None:
            return value
        if not begun and marked.text(op, marked.BACK):
            raise refusals.given_gradients(gradient.variable, op)
        source = self._plan.source(op.inputs[0].op)
        weight = self._shares.weight(source, loss, self._plan, self._places, self._n)
        weight = tf.cast(weight, value.dtype)
        if not begun:
            return tf.math.multiply_no_nan(value, weight)
        # Where a replica has nothing to divide by, its gradient is no number.
        spoilt = tf.equal(weight, 0) & ~tf.math.is_finite(value)
        return tf.where(spoilt, tf.zeros_like(value), value)

    def agree(self, write: Write) -> None:
        """Makes what replicas write equal, as it would be on one device."""
        op, value = write.op, write.value
        copy = self._places[self._n][op]
        original = self._program.variable_behind(op.inputs[0])
        assert original is not None, "it writes a variable"
        if original.aggregation == _SUM and op.type != "AssignVariableOp":
            value = losses.SUM
        how = {Kind.MAX: "max", Kind.MIN: "min"}.get(value.kind, "sum")
        linear = value.kind in (Kind.SAME, Kind.MEAN) and value.mixed is None
        if how == "sum" and not linear:
            whole = self._whole(op, value)
            if whole is not None:
                _tf.set_input(copy, 1, tf.cast(whole, copy.inputs[1].dtype))
                return
            if value.mixed is None:
                raise refusals.no_whole(
                    original.op.name, errors.line_of(op), value.said
                )
        own = copy.inputs[1]
        if how == "sum":
            own = self._part(op, own, value)
        (agreed,) = all_reduce.combine([own], how, None)
        if how == "sum" and own.dtype != copy.inputs[1].dtype:
            agreed = tf.cast(tf.round(agreed), copy.inputs[1].dtype)
        _tf.set_input(copy, 1, agreed)

    def _part(self, op: tf.Operation, own: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns what a replica adds to a value of all examples."""
        source = self._plan.source(op.inputs[1].op)
        power = value.power if value.kind in (Kind.SAME, Kind.MEAN) else 0
        weight = self._shares.weight(
            source, Value(Kind.MEAN, power), self._plan, self._places, self._n
        )
        if own.dtype.is_floating or own.dtype.is_complex:
            return own * tf.cast(weight, own.dtype)
        if power != 1:
            return tf.cast(own, tf.float64) * tf.cast(weight, tf.float64)
        # Where nothing is split, all weigh 1/R: one of them is enough.
        counts = weight >= 1 if self._n else weight > 0
        return tf.where(counts, own, tf.zeros_like(own))

    def _whole(self, op: tf.Operation, value: Value) -> tf.Tensor | None:
        """Returns what is written, computed of all examples; None if it cannot be."""
        cut = joining.cut(self._plan.kinds, op.inputs[1], rows=False)
        if cut is None or value.mixed is not None:
            return None
        return joining.again(cut, op.inputs[1], self._joined)

    def _joined(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns a value of all examples, which replicas tell one another."""
        own = self._places[self._n][tensor.op].outputs[tensor.value_index]
        if kinds.is_same(value):
            return own
        how = {Kind.MAX: "max", Kind.MIN: "min"}.get(value.kind, "sum")
        if how == "sum":
            source = self._plan.source(tensor.op)
            weight = self._shares.weight(
                *(source, value.replaced(kind=Kind.MEAN), self._plan, self._places),
                self._n,
            )
            wide = own if own.dtype.is_floating else tf.cast(own, tf.float64)
            (made,) = all_reduce.combine(
                [wide * tf.cast(weight, wide.dtype)], how, None
            )
            return tf.cast(made if own.dtype.is_floating else tf.round(made), own.dtype)
        (made,) = all_reduce.combine([own], how, None)
        return made
