# SPDX-License-Identifier: Apache-2.0
"""Where one replica's copy communicates: gradients, and writes of what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context
from replicator.autodist import refusals
from replicator.autodist.divided import Divided
from replicator.autodist.kinds import Kind
from replicator.autodist.losses import Loss
from replicator.autodist.program import Program
from replicator.autodist.shares import Gradient, Plan, Shares, Write
from replicator.autodist.stamping import Places
from replicator.compressors import reducing, specs
from replicator.compressors.memory import Place
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
        divided: What it is a copy of, if variables are in parts.
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
        """Reduces gradients that belong together; returns what their markers become."""
        places, made = self._places[self._n], {}
        pieces = [own for gradient in group for own in self._pieces(gradient)]
        gradients = [one for _, one in pieces]
        reduced = self._summed([own.variable for own, _ in pieces], gradients)
        for (own, _), result in zip(pieces, reduced, strict=True):
            sparse = isinstance(result, tf.IndexedSlices)
            tensors = [result.values, result.indices] if sparse else [result]
            for op, tensor in zip(own.ops, tensors, strict=True):
                _tf.replace(places[op].outputs[0], tensor)
                if own.variable in self._program.variables:
                    # What is fetched of the marker is this, the only result of an op.
                    alone = tf.identity(tensor) if tensor.value_index else tensor
                    made[op] = alone.op
        return made

    def _summed(self, names: Sequence[str], gradients: Sequence[Any]) -> Sequence[Any]:
        """Returns the sums over all replicas, compressed on their way where asked."""
        variables = [self._variables[name] for name in names]
        policies = [variable.policy for variable in variables]
        compressors = [
            specs.compressor(name, variable.storage.synchronizer.compressor or None)
            for name, variable in zip(names, variables, strict=True)
        ]
        if not any(compressors):
            return all_reduce.combine(gradients, "sum", None, policies)
        members = context.require("a compressor").build.world.everyone
        # Nothing is kept there: casts keep nothing.
        place = Place(tf.Module(name="AutoDist"), "AutoDist")
        call = reducing.Call("sum", members, None, place)
        return reducing.reduce(call, gradients, compressors, policies)

    def _pieces(self, gradient: Gradient) -> list[tuple[Gradient, Any]]:
        """Returns a gradient as this replica has it, weighed; of each part, if any."""
        plan, places = self._plan, self._places[self._n]
        loss, weight = plan.loss_behind(gradient), None
        if loss is not None:
            source = plan.source(gradient.ops[0].inputs[0].op)
            weight = self._shares.weight(source, loss, self._places, self._n)
        made: list[tuple[Gradient, Any]] = []
        divided = self._divided
        for own in [gradient] if divided is None else divided.gradients(gradient):
            inputs = [places[op].inputs[0] for op in own.ops]
            if weight is not None:
                factor = tf.cast(weight, inputs[0].dtype)
                inputs[0] = tf.math.multiply_no_nan(inputs[0], factor)
            sparse = len(inputs) > 1
            made.append((own, tf.IndexedSlices(*inputs) if sparse else inputs[0]))
        return made

    def agree(self, write: Write) -> None:
        """Makes what replicas write equal, as it would be on one device."""
        op, kind = write.op, write.kind
        copied, at = (op, 1) if self._divided is None else self._divided.value_of(op)
        copy = self._places[self._n][copied]
        value = copy.inputs[at]
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
        _tf.set_input(copy, at, agreed)
