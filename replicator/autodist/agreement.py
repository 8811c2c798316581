# SPDX-License-Identifier: Apache-2.0
"""Where one replica's copy communicates: gradients, and writes of what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import refusals
from replicator.autodist.kinds import Kind
from replicator.autodist.losses import Loss
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
        plan, places, made = self._plan, self._places[self._n], {}
        gradients, policies = [], []
        for gradient in group:
            inputs = [places[op].inputs[0] for op in gradient.ops]
            loss = plan.loss_behind(gradient)
            if loss is not None:
                source = plan.source(gradient.ops[0].inputs[0].op)
                weight = self._shares.weight(source, loss, self._places, self._n)
                weight = tf.cast(weight, inputs[0].dtype)
                inputs[0] = tf.math.multiply_no_nan(inputs[0], weight)
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
                # What is fetched of the marker is this, the only result of an op.
                made[op] = (tf.identity(part) if part.value_index else part).op
        return made

    def agree(self, write: Write) -> None:
        """Makes what replicas write equal, as it would be on one device."""
        op, kind = write.op, write.kind
        copy = self._places[self._n][op]
        value = copy.inputs[1]
        original = self._program.variable_behind(op.inputs[0])
        assert original is not None, "it writes a variable"
        if original.aggregation == _SUM and op.type != "AssignVariableOp":
            kind = Kind.SUM
        how = {Kind.MAX: "max", Kind.MIN: "min"}.get(kind, "sum")
        if how == "sum":
            if not value.dtype.is_floating and kind not in (Kind.SUM, Kind.COUNT):
                raise refusals.no_mean(original, op)
            source = self._plan.source(op.inputs[1].op)
            weight = self._shares.weight(source, Loss(kind), self._places, self._n)
            if value.dtype.is_floating:
                value *= tf.cast(weight, value.dtype)
            else:
                # Where nothing is split, all weigh 1/R: one of them is enough.
                counts = weight >= 1 if self._n else weight > 0
                value = tf.where(counts, value, tf.zeros_like(value))
        (agreed,) = all_reduce.combine([value], how, None)
        _tf.set_input(copy, 1, agreed)
