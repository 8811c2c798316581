# SPDX-License-Identifier: Apache-2.0
"""Infers what depends on a replica's examples in the graph that a function builds.

How losses and results depend on the split of the examples follows from that graph, as
in a session. It is examined when a gradient is taken: by then it contains the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import _tf, context, errors
from replicator.autodist import flows, joining, losses, refusals, weighting, wholes
from replicator.autodist import kinds as rules
from replicator.autodist.kinds import SAME, UNKNOWN, Kind, Value
from replicator.autodist.values import Values
from replicator.autodist.weighting import Weighting
from replicator.autodist.wholes import Whole
from replicator.graph.ir import placeholder, shapes
from replicator.primitives import all_reduce


class Examples:
    """The examples of one replica, and what its graph computes from them.

    Args:
        replica: The replica, which is being built.
        given: Its parts of the batch; empty if the batch is not split.
        declared: What the user declares losses to be, "mean" or "sum"; None if nothing.
        all_have_some: Whether every replica is known to have an example.
    """

    def __init__(
        self,
        replica: context.ReplicaContext,
        given: Sequence[tf.Tensor],
        declared: str | None = None,
        all_have_some: bool = False,
    ) -> None:
        self._replica, self._batches, self._declared_loss = replica, given, declared
        self._all_have_some = all_have_some
        self._weights: dict[tuple[int, int], Weighting] = {}
        # Each start of differentiation (an initial gradient), its weighted replacement,
        # and the Value of that if it differs from the start's.
        self._starts: list[tuple[tf.Tensor, tf.Tensor, Value | None]] = []
        self._warned_ops: set[tf.Operation] = set()
        # By tensor id: a tensor that must be of the whole batch, its replacement, which
        # is, and the Value of that.
        self._replacements: dict[int, tuple[tf.Tensor, tf.Tensor, Value]] = {}
        self._seen_uses: set[tuple[tf.Operation, int]] = set()
        # By graph of a function that takes gradients: the Values that its arguments are
        # assumed to have, by tensor id.
        self._assumptions: dict[Any, dict[int, Value]] = {}

    @property
    def are_split(self) -> bool:
        """Whether the batch is split, so that each replica has its own examples."""
        return bool(self._batches)

    def weighed(self, gradient: Any, back: bool = False) -> Any:
        """Scales a gradient by its replica's share of the sum over replicas.

        Args:
            gradient: The gradient that is being taken, dense or sparse.
            back: Whether it passes through the gradient of a variable.

        Raises:
            UnsupportedError: The graph does not tell its weight.
        """
        replica = self._replica
        if replica.num_replicas == 1:
            return gradient
        if not self._batches:  # all compute the whole batch, and equal gradients
            share = tf.constant(1 / replica.num_replicas)
            return gradient if back else weighting.scaled(gradient, share)
        differentiation = _tf.differentiated()
        if differentiation is None:
            raise losses.not_found("", errors.user_line())
        targets, upstream = (
            [_to_tensor(item) for item in items]
            for items in (differentiation.targets, differentiation.given)
        )
        graph = tf.compat.v1.get_default_graph()
        # Each call creates its own starts, even for targets differentiated before.
        key = id(graph), id(differentiation.call)
        if key not in self._weights:
            self._weights[key] = weighting.make(
                differentiation.call,
                *self._weight_starts(graph, targets, upstream),
                self._all_have_some,
            )
        loss_weighting = self._weights[key]
        self.go_on(graph)
        if loss_weighting.begins:
            gradient = self._replace_start(gradient)
            return gradient if back else weighting.guarded(gradient, loss_weighting)
        if back:
            raise refusals.given_gradients("a variable", errors.user_line())
        return weighting.scaled(gradient, loss_weighting.weight)

    def _weight_starts(
        self,
        graph: Any,
        targets: Sequence[tf.Tensor | None],
        upstream: Sequence[tf.Tensor | None],
    ) -> tuple[Value, tf.Tensor, bool]:
        """Classifies the loss, and weights the starts of its differentiation.

        Returns:
            The loss's Value, its weight, and whether the starts could be weighted.
        """
        starts = [t for t in upstream if t is not None and _is_start(t.op)]
        if len(starts) == len(upstream):  # tf.gradients, which copies what it is passed
            upstream = [
                start.op.inputs[0] if _is_copy(start.op) else None for start in starts
            ]
        elif any(tensor is not None for tensor in upstream):
            starts = []
        else:
            start_ops = _tf.begun_by_tape(graph, len(targets))
            starts = [op.outputs[0] for op in start_ops]
        tensors = [tensor for tensor in (*targets, *upstream) if tensor is not None]
        loss = losses.find(self.kinds(tensors), targets, upstream, self._declared_loss)
        self._warn_mixed(loss)
        self._combine_operands(loss.wholes)
        weight = self._weight(loss)
        weighted_ids = {id(start) for start, _, _ in self._starts}
        if not starts or any(id(start) in weighted_ids for start in starts):
            return loss, weight, False
        start_values = [self.kinds([start]).of(start) for start in starts]
        with _tf.stop_recording():
            for start, start_value in zip(starts, start_values, strict=True):
                value = rules.of_start(loss, start_value)
                self._starts.append(
                    (start, start * tf.cast(weight, start.dtype), value)
                )
        return loss, weight, True

    def go_on(self, graph: Any) -> None:
        """Replaces starts of differentiation by weighted ones in all uses by now.

        Also makes gradients use the whole-batch values of tensors that need them.
        """
        for start, scaled, _ in self._starts:
            if start.graph is not graph:
                continue
            for consumer in list(start.consumers()):
                for k, operand in enumerate(consumer.inputs):
                    if operand is start and consumer is not scaled.op:
                        _tf.set_input(consumer, k, scaled)
        start_ops = {start.op for start, _, _ in self._starts if start.graph is graph}
        for tensor, whole, _ in self._replacements.values():
            if tensor.graph is graph and not self._seen_uses.issuperset(
                wholes.uses(tensor)
            ):
                self._seen_uses.update(wholes.uses(tensor))
                wholes.put(whole, wholes.in_gradients(tensor, start_ops, whole))

    def _replace_start(self, gradient: Any) -> Any:
        """Returns a gradient, or its weighted replacement if it is itself a start."""
        scaled = {id(start): weighted for start, weighted, _ in self._starts}
        return weighting.mapped(gradient, lambda g: scaled.get(id(g), g))

    def _warn_mixed(self, value: Value) -> None:
        """Warns if a value has rows that depend on other examples than their own."""
        op = value.mixed
        if op is not None and op not in self._warned_ops:
            self._warned_ops.add(op)
            if not self._replica.replica_id:
                logging.warning("%s", losses.mixes(op))

    def _combine_operands(self, operands: Collection[Whole]) -> None:
        """Replaces operands that must be of the whole batch by combined ones.

        Raises:
            UnsupportedError: An operand cannot be computed for the whole batch.
        """
        uses_by_tensor = wholes.by_tensor(operands)
        if uses_by_tensor is None:
            raise losses.no_whole(next(iter(operands)).tensor)
        for uses in uses_by_tensor.values():
            tensor, power = uses[0].tensor, uses[0].power
            if id(tensor) not in self._replacements:
                if tensor.graph is not tf.compat.v1.get_default_graph():
                    raise losses.no_whole(tensor)
                whole = self.whole(self.kinds([tensor]), tensor)
                if whole is None:
                    raise losses.no_whole(tensor)
                value = Value(Kind.SAME, power, by_value=False)
                with _tf.stop_recording():
                    replacement = wholes.scaled(whole, power, self._replica.weight)
                self._replacements[id(tensor)] = tensor, replacement, value
            _, replacement, value = self._replacements[id(tensor)]
            if value.power != power:
                raise losses.no_whole(tensor)
            wholes.put(replacement, [(use.op, use.index) for use in uses])

    def _weight(self, loss: Value) -> tf.Tensor:
        """Returns the weight of this replica's loss in the sum over replicas."""
        weight = joining.share_of(loss.power, self._replica.weight)
        if loss.over is None:
            return weight
        divisor = weight * tf.cast(tf.size(loss.over), tf.float32)
        (total,) = all_reduce.combine([divisor], "sum", None)
        return joining.part_of(divisor, total, weight)

    def whole(self, known: Values, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns a tensor as of the whole batch; None if it cannot be computed.

        Args:
            known: Infers Values of the tensor's graph.
            tensor: A tensor of this replica, without rows.
        """
        value = known.of(tensor)
        if value.wholes:
            self._combine_operands(value.wholes)
            known = self.kinds([tensor])
            value = known.of(tensor)
        if joining.joins(value, rows=False):
            return self._combine(tensor, value)
        cut = joining.cut(known, tensor, rows=False)
        if cut is None:
            return None
        with _tf.stop_recording():
            return joining.again(cut, tensor, self._combine, tensor.op.device)

    def of_all(self, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns a tensor without rows as of the whole batch, or None.

        What depends on batch statistics is averaged, and a warning says so.
        """
        known = self.kinds([tensor])
        value = known.of(tensor)
        self._warn_mixed(value)
        (alone,) = rules.alone([value])
        if value.mixed is not None and joining.joins(alone, rows=False):
            return self._combine(tensor, alone)
        return self.whole(known, tensor)

    def _combine(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns a tensor of the whole batch, reduced over the replicas."""
        return joining.of_all(
            value,
            tensor,
            lambda: joining.share_of(value.power, self._replica.weight),
        )

    def agreed(self, variable: Any, value: tf.Tensor) -> tf.Tensor | None:
        """Returns the value of the whole batch that is written to a variable.

        Args:
            variable: The variable.
            value: The value that this replica writes.

        Returns:
            None if the mean of what the replicas write will do, or all write the same.

        Raises:
            UnsupportedError: It does not follow from what the replicas write.
        """
        graph = tf.compat.v1.get_default_graph()
        if not self._batches or not tf.is_symbolic_tensor(value):
            return None
        if value.graph is not graph:  # of a graph around this branch or loop
            value = graph.capture(value)
        values = self.kinds([value])
        written = values.of(value)
        self._warn_mixed(written)
        if written.wholes and written.mixed is None:
            self._combine_operands(written.wholes)
            values = self.kinds([value])
            written = values.of(value)
        is_mean = written.kind in (Kind.SAME, Kind.MEAN) and not written.power
        if written.mixed is not None or written.kind is Kind.DRAWN or is_mean:
            return None
        whole = self.whole(values, value)
        if whole is None:
            raise refusals.no_whole(variable.name, errors.user_line(), written.said)
        return whole

    def kinds(self, tensors: Sequence[tf.Tensor]) -> Values:
        """Returns the Values of tensors of one graph, and of all they depend on."""
        graph = tensors[0].graph
        starts = [(t, v) for t, _, v in self._starts if v is not None]
        starts += [(t, v) for _, t, v in self._replacements.values() if v.power]
        start_values = {id(t): v for t, v in starts if t.graph is graph}
        if graph is self._replica.build.graph:
            differing = {tensor.op: "value" for tensor in self._batches}
            input_values = {id(tensor): Value(Kind.ROWS) for tensor in self._batches}
        else:
            differing, input_values = self._inputs(graph)
        differing |= {t.op: "shape" for t, _ in starts if id(t) in start_values}
        flow = self._flow(tensors, differing, {**input_values, **start_values})
        return Values(flow, dealt=False)  # see pulled.refuse

    def _inputs(self, graph: Any) -> tuple[dict[tf.Operation, str], dict[int, Value]]:
        """Returns which inputs of a function's graph differ, and the Values of all.

        A function is only called once its graph is complete, so the Values of its
        arguments are assumed from their shapes; `check` confirms them.
        """
        values: dict[int, Value] = {}
        captured = {id(inner): outer for outer, inner in graph.captures}
        for tensor in graph.inputs:
            outer = captured.get(id(tensor))
            if outer is not None:
                is_outside = tf.is_symbolic_tensor(outer) and outer.graph is not graph
                values[id(tensor)] = (
                    self.kinds([outer]).of(outer) if is_outside else SAME
                )
            elif tensor.shape.rank and shapes.sizes(tensor)[0] is None:
                values[id(tensor)] = Value(Kind.ROWS)
            else:
                is_equal = tensor.dtype in (tf.resource, tf.variant, tf.bool)
                values[id(tensor)] = SAME if is_equal else UNKNOWN
        self._assumptions[graph] = {
            id(tensor): values[id(tensor)]
            for tensor in graph.inputs
            if id(tensor) not in captured and tensor.dtype not in _HANDLES
        }
        differing = {
            tensor.op: "value" if values[id(tensor)].by_value else "shape"
            for tensor in graph.inputs
            if not rules.is_same(values[id(tensor)])
        }
        return differing, values

    def check(self) -> None:
        """Checks the assumed arguments of functions that take gradients.

        Raises:
            UnsupportedError: A function is called with an argument of another kind.
        """
        for graph in (
            (self._replica.build.graph, *self._assumptions) if self._assumptions else ()
        ):
            for op in graph.get_operations():
                if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
                    continue
                for _, body in _tf.called_graphs(op):
                    assumed = self._assumptions.get(body, {})
                    for tensor, inner in zip(op.inputs, body.inputs, strict=False):
                        if id(inner) in assumed:
                            self._check_argument(tensor, assumed[id(inner)], op)

    def _check_argument(
        self, tensor: tf.Tensor, assumed: Value, op: tf.Operation
    ) -> None:
        value = self.kinds([tensor]).of(tensor)
        self._warn_mixed(value)
        if value.wholes:
            self._combine_operands(value.wholes)
            value = self.kinds([tensor]).of(tensor)
        is_equal = value.replaced(by_value=assumed.by_value, mixed=None) == assumed
        if assumed.kind is not Kind.UNKNOWN and not is_equal:
            raise refusals.argument(tensor.name, errors.line_of(op), value)

    def _flow(
        self,
        tensors: Sequence[tf.Tensor],
        differing: dict[tf.Operation, str],
        values: dict[int, Value],
    ) -> flows.Flow:
        """Returns which of the ops that tensors depend on differ between replicas."""
        ops = flows.upstream(
            tensors, lambda op: op in differing or _has_equal_results(op)
        )
        return flows.flow(
            ops,
            lambda op: differing.get(op) or ("value" if flows.draws(op) else ""),
            _has_equal_results,
            given=values,
        )


_HANDLES = (tf.resource, tf.variant)


def _is_start(op: tf.Operation) -> bool:
    """Whether an op is one that tf.gradients starts from."""
    return op.name.rpartition("/")[2].startswith("grad_ys_")


def _is_copy(op: tf.Operation) -> bool:
    """Whether a start of tf.gradients is a copy of a gradient that the user passes."""
    return op.type == "Identity"


def _to_tensor(item: Any) -> tf.Tensor | None:
    """Converts a target, or a gradient that is passed for one, to a tensor."""
    if item is None or tf.is_symbolic_tensor(item):
        return item
    return tf.convert_to_tensor(item)


def _has_equal_results(op: tf.Operation) -> bool:
    """Whether an op communicates and gives all replicas the same results."""
    if op.type != placeholder.TYPE:
        return False
    call = placeholder.call_of(op.get_attr("token"))
    return call is not None and bool(call.same_for_all(len(op.outputs)))
