# SPDX-License-Identifier: Apache-2.0
"""Where one replica's copy communicates: gradients, and writes of what differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.autodist import joining, losses, marked, refusals, stamping
from replicator.autodist.divided import Divided
from replicator.autodist.kinds import Kind, Value
from replicator.autodist.program import Program
from replicator.autodist.shares import Plan, Shares, Write
from replicator.autodist.stamping import Places
from replicator.autodist.taken import Gradient
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
        places, divided = self._places[self._n], self._divided
        weigh, made = self._weigher(gradient), []
        for own in [gradient] if divided is None else divided.gradients(gradient):
            inputs = [places[op].inputs[0] for op in own.ops]
            inputs[0] = weigh(inputs[0])
            sparse = len(inputs) > 1
            made.append((own, tf.IndexedSlices(*inputs) if sparse else inputs[0]))
        return made

    def _weigher(self, gradient: Gradient) -> Callable[[tf.Tensor], tf.Tensor]:
        """Returns what weighs a gradient, for the sum over all replicas."""
        op = gradient.ops[0]
        loss, begun = self._plan.loss_behind(gradient)
        if begun and loss.over is None:
            return lambda value: value
        split = self._program.is_split
        if split and not begun and marked.text(op, marked.BACK):
            line = errors.line_of(op)
            raise refusals.given_gradients(f"variable {gradient.variable}", line)
        source = self._plan.source(op.inputs[0].op)
        weight = self._shares.weight(source, loss, self._places, self._n)

        def weigh(value: tf.Tensor) -> tf.Tensor:
            own = tf.cast(weight, value.dtype)
            if not begun:
                return tf.math.multiply_no_nan(value, own)
            # Where a replica has nothing to divide by, its gradient is no number.
            spoilt = tf.equal(own, 0) & ~tf.math.is_finite(value)
            return tf.where(spoilt, tf.zeros_like(value), value)

        return weigh

    def agree(self, write: Write) -> None:
        """Makes what replicas write equal, as it would be on one device."""
        op, value = write.op, write.value
        copied, at = (op, 1) if self._divided is None else self._divided.value_of(op)
        copy = self._places[self._n][copied]
        own = copy.inputs[at]
        dtype = own.dtype
        original = self._program.variable_behind(op.inputs[0])
        assert original is not None, "it writes a variable"
        if original.aggregation == _SUM and op.type != "AssignVariableOp":
            value = losses.SUM
        how = {Kind.MAX: "max", Kind.MIN: "min"}.get(value.kind, "sum")
        linear = value.kind in (Kind.SAME, Kind.MEAN) and value.mixed is None
        if how == "sum" and not linear:
            whole = self._whole(op, value)
            if whole is not None:
                _tf.set_input(copy, at, tf.cast(whole, dtype))
                return
            if value.mixed is None:
                raise refusals.no_whole(
                    original.op.name, errors.line_of(op), value.said
                )
        if how == "sum":
            own = self._part(op, own, value)
        (agreed,) = all_reduce.combine([own], how, None)
        if how == "sum" and agreed.dtype != dtype:
            agreed = tf.cast(tf.round(agreed), dtype)
        _tf.set_input(copy, at, agreed)

    def _part(self, op: tf.Operation, own: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns what a replica adds to a value of all examples."""
        source = self._plan.source(op.inputs[1].op)
        power = value.power if value.kind in (Kind.SAME, Kind.MEAN) else 0
        weight = self._shares.weight(
            source, Value(Kind.MEAN, power), self._places, self._n
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
        cut = joining.cut(self._plan.kinds, op.inputs[1], rows=False, put=True)
        if cut is None or value.mixed is not None:
            return None
        return joining.again(cut, op.inputs[1], self._joined)

    def _joined(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns a value of all examples, which replicas tell one another."""
        own = stamping.of(self._places[self._n], tensor)
        value = self._plan.unweighed(tensor, value)

        def weight() -> tf.Tensor:
            mean = value.replaced(kind=Kind.MEAN)
            source = self._plan.source(tensor.op)
            return self._shares.weight(source, mean, self._places, self._n)

        return joining.of_all(value, own, weight)
