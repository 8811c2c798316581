# SPDX-License-Identifier: Apache-2.0
"""What depends on the examples of a replica, in the graph that a function builds.

What losses and results are follows from that graph as it does in a session's; it is
looked at where a gradient is taken, when what is differentiated is there already.
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
    """The examples of one replica.

    Args:
        replica: The replica, which is being built.
        given: What it has of them.
        declared: What the user says that losses are, "mean" or "sum", if anything.
        all_have_some: Whether every replica is known to have an example.
    """

    def __init__(
        self,
        replica: context.ReplicaContext,
        given: Sequence[tf.Tensor],
        declared: str | None = None,
        all_have_some: bool = False,
    ) -> None:
        self._replica, self._given, self._declared = replica, given, declared
        self._all_have_some = all_have_some
        self._weights: dict[tuple[int, int], Weighting] = {}
        # From where tapes began, what is in its place, and what that is.
        self._begun: list[tuple[tf.Tensor, tf.Tensor, Value | None]] = []
        self._warned: set[tf.Operation] = set()
        # What was put together, what is in its place, and what that is.
        self._whole: dict[int, tuple[tf.Tensor, tf.Tensor, Value]] = {}
        self._seen: set[tuple[tf.Operation, int]] = set()
        # Of functions that take gradients: what their arguments are taken to be.
        self._taken: dict[Any, dict[int, Value]] = {}

    @property
    def are_split(self) -> bool:
        """Whether there are any."""
        return bool(self._given)

    def weighed(self, gradient: Any, back: bool = False) -> Any:
        """Returns a gradient as it counts in the sum of all replicas'.

        Args:
            gradient: The gradient that is being taken, dense or sparse.
            back: Whether it leads through the gradient of a variable.

        Raises:
            UnsupportedError: The graph does not tell what it weighs.
        """
        replica = self._replica
        if replica.num_replicas == 1:
            return gradient
        if not self._given:  # each does all of it: so all that comes back is the same
            part = tf.constant(1 / replica.num_replicas)
            return gradient if back else weighting.scaled(gradient, part)
        found = _tf.differentiated()
        if found is None:
            raise losses.not_found("", errors.user_line())
        targets, given = (
            [_tensor(one) for one in part] for part in (found.targets, found.given)
        )
        graph = tf.compat.v1.get_default_graph()
        # Each call starts from ones of its own, also of what was differentiated before.
        key = id(graph), id(found.call)
        if key not in self._weights:
            self._weights[key] = weighting.make(
                found.call, *self._begin(graph, targets, given), self._all_have_some
            )
        known = self._weights[key]
        self.go_on(graph)
        if known.begins:
            gradient = self._begins_with(gradient)
            return gradient if back else weighting.guarded(gradient, known)
        if back:
            raise refusals.given_gradients("a variable", errors.user_line())
        return weighting.scaled(gradient, known.weight)

    def _begin(
        self,
        graph: Any,
        targets: Sequence[tf.Tensor | None],
        given: Sequence[tf.Tensor | None],
    ) -> tuple[Value, tf.Tensor, bool]:
        """Finds out what is differentiated, and has that start from what it weighs.

        Returns:
            What it is, what it weighs, and whether it could be made to start so.
        """
        begun = [one for one in given if one is not None and _is_start(one.op)]
        if len(begun) == len(given):  # tf.gradients, which notes what it was given
            given = [one.op.inputs[0] if _is_given(one.op) else None for one in begun]
        elif any(one is not None for one in given):
            begun = []
        else:
            made = _tf.begun_by_tape(graph, len(targets))
            begun = [op.outputs[0] for op in made]
        tensors = [one for one in (*targets, *given) if one is not None]
        loss = losses.find(self.kinds(tensors), targets, given, self._declared)
        self._warn(loss)
        self._put_together(loss.wholes)
        weight = self._weight(loss)
        known = {id(one) for one, _, _ in self._begun}
        if not begun or any(id(one) in known for one in begun):
            return loss, weight, False
        values = [self.kinds([one]).of(one) for one in begun]
        with _tf.stop_recording():
            for one, own in zip(begun, values, strict=True):
                value = rules.of_start(loss, own)
                self._begun.append((one, one * tf.cast(weight, one.dtype), value))
        return loss, weight, True

    def go_on(self, graph: Any) -> None:
        """Puts weights in the places of ones, wherever a graph uses these by now.

        So it does with what is of the whole batch, in gradients.
        """
        for one, scaled, _ in self._begun:
            if one.graph is not graph:
                continue
            for consumer in list(one.consumers()):
                for k, tensor in enumerate(consumer.inputs):
                    if tensor is one and consumer is not scaled.op:
                        _tf.set_input(consumer, k, scaled)
        starts = {one.op for one, _, _ in self._begun if one.graph is graph}
        for own, given, _ in self._whole.values():
            if own.graph is graph and not self._seen.issuperset(wholes.uses(own)):
                self._seen.update(wholes.uses(own))
                wholes.put(given, wholes.in_gradients(own, starts, given))

    def _begins_with(self, gradient: Any) -> Any:
        """Returns a gradient, be it what a tape started from."""
        scaled = {id(one): new for one, new, _ in self._begun}
        return weighting.mapped(gradient, lambda g: scaled.get(id(g), g))

    def _warn(self, loss: Value) -> None:
        """Warns of rows that are made of more than their own example."""
        op = loss.mixed
        if op is not None and op not in self._warned:
            self._warned.add(op)
            if not self._replica.replica_id:
                logging.warning("%s", losses.mixes(op))

    def _put_together(self, made: Collection[Whole]) -> None:
        """Puts together what has to be of the whole batch, where it is used.

        Raises:
            UnsupportedError: It cannot be.
        """
        several = wholes.by_tensor(made)
        if several is None:
            raise losses.no_whole(next(iter(made)).tensor)
        for uses in several.values():
            own, power = uses[0].tensor, uses[0].power
            if id(own) not in self._whole:
                if own.graph is not tf.compat.v1.get_default_graph():
                    raise losses.no_whole(own)
                whole = self.whole(self.kinds([own]), own)
                if whole is None:
                    raise losses.no_whole(own)
                value = Value(Kind.SAME, power, by_value=False)
                with _tf.stop_recording():
                    given = wholes.scaled(whole, power, self._replica.weight)
                self._whole[id(own)] = own, given, value
            _, given, value = self._whole[id(own)]
            if value.power != power:
                raise losses.no_whole(own)
            wholes.put(given, [(one.op, one.index) for one in uses])

    def _weight(self, loss: Value) -> tf.Tensor:
        weight = joining.share_of(loss.power, self._replica.weight)
        if loss.over is None:
            return weight
        over = weight * tf.cast(tf.size(loss.over), tf.float32)
        (total,) = all_reduce.combine([over], "sum", None)
        return joining.part_of(over, total, weight)

    def whole(self, known: Values, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns a value without rows of all examples; None if it cannot be computed.

        Args:
            known: Finds what values are.
            tensor: The value.
        """
        value = known.of(tensor)
        if value.wholes:
            self._put_together(value.wholes)
            known = self.kinds([tensor])
            value = known.of(tensor)
        if joining.joins(value, rows=False):
            return self._joined(tensor, value)
        cut = joining.cut(known, tensor, rows=False)
        if cut is None:
            return None
        with _tf.stop_recording():
            return joining.again(cut, tensor, self._joined, tensor.op.device)

    def _joined(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Returns a value of all examples, which replicas tell one another."""
        return joining.of_all(
            value,
            tensor,
            lambda: joining.share_of(value.power, self._replica.weight),
        )

    def agreed(self, variable: Any, value: tf.Tensor) -> tf.Tensor | None:
        """Returns what is written to a variable, of all examples.

        Args:
            variable: The variable.
            value: What this replica writes.

        Returns:
            None if it is a mean of what the replicas write, or the same on all.

        Raises:
            UnsupportedError: It does not follow from what the replicas write.
        """
        graph = tf.compat.v1.get_default_graph()
        if not self._given or not tf.is_symbolic_tensor(value):
            return None
        if value.graph is not graph:
            return None
        known = self.kinds([value])
        found = known.of(value)
        self._warn(found)
        if found.wholes and found.mixed is None:
            self._put_together(found.wholes)
            known = self.kinds([value])
            found = known.of(value)
        level = found.kind in (Kind.SAME, Kind.MEAN) and not found.power
        if found.mixed is not None or found.kind is Kind.DRAWN or level:
            return None
        whole = self.whole(known, value)
        if whole is None:
            raise refusals.no_whole(variable.name, errors.user_line(), found.said)
        return whole

    def kinds(self, tensors: Sequence[tf.Tensor]) -> Values:
        """Returns what finds the kinds of tensors of one graph, and of all before."""
        graph = tensors[0].graph
        starts = [(t, v) for t, _, v in self._begun if v is not None]
        starts += [(t, v) for _, t, v in self._whole.values() if v.power]
        begun = {id(t): v for t, v in starts if t.graph is graph}
        if graph is self._replica.build.graph:
            own = {tensor.op: "value" for tensor in self._given}
            given = {id(tensor): Value(Kind.ROWS) for tensor in self._given}
        else:
            own, given = self._inputs(graph)
        own |= {t.op: "shape" for t, _ in starts if id(t) in begun}
        return Values(self._flow(tensors, own, {**given, **begun}))

    def _inputs(self, graph: Any) -> tuple[dict[tf.Operation, str], dict[int, Value]]:
        """Returns which inputs of a function's graph differ, and what is known of all.

        A function is called when its graph is there; of what it is given as arguments,
        the shapes have to tell.
        """
        given: dict[int, Value] = {}
        captured = {id(inner): outer for outer, inner in graph.captures}
        for tensor in graph.inputs:
            outer = captured.get(id(tensor))
            if outer is not None:
                known = tf.is_symbolic_tensor(outer) and outer.graph is not graph
                given[id(tensor)] = self.kinds([outer]).of(outer) if known else SAME
            elif tensor.shape.rank and shapes.sizes(tensor)[0] is None:
                given[id(tensor)] = Value(Kind.ROWS)
            else:
                same = tensor.dtype in (tf.resource, tf.variant, tf.bool)
                given[id(tensor)] = SAME if same else UNKNOWN
        self._taken[graph] = {
            id(tensor): given[id(tensor)]
            for tensor in graph.inputs
            if id(tensor) not in captured and tensor.dtype not in _HANDLES
        }
        own = {
            tensor.op: "value" if given[id(tensor)].by_value else "shape"
            for tensor in graph.inputs
            if not rules.is_same(given[id(tensor)])
        }
        return own, given

    def check(self) -> None:
        """Raises unless functions are given what they were taken to be given.

        Raises:
            UnsupportedError: One that takes gradients is not.
        """
        for graph in (self._replica.build.graph, *self._taken) if self._taken else ():
            for op in graph.get_operations():
                if op.type not in ("PartitionedCall", "StatefulPartitionedCall"):
                    continue
                for _, body in _tf.called_graphs(op):
                    taken = self._taken.get(body, {})
                    for tensor, inner in zip(op.inputs, body.inputs, strict=False):
                        if id(inner) in taken:
                            self._check(tensor, taken[id(inner)], op)

    def _check(self, tensor: tf.Tensor, taken: Value, op: tf.Operation) -> None:
        value = self.kinds([tensor]).of(tensor)
        self._warn(value)
        if value.wholes:
            self._put_together(value.wholes)
            value = self.kinds([tensor]).of(tensor)
        alike = value.replaced(by_value=taken.by_value, mixed=None) == taken
        if taken.kind is not Kind.UNKNOWN and not alike:
            raise refusals.argument(tensor.name, errors.line_of(op), value)

    def _flow(
        self,
        tensors: Sequence[tf.Tensor],
        own: dict[tf.Operation, str],
        given: dict[int, Value],
    ) -> flows.Flow:
        """Returns what differs of that on which tensors depend."""
        ops = flows.upstream(tensors, lambda op: op in own or _is_same(op))
        return flows.flow(
            ops,
            lambda op: own.get(op) or ("value" if flows.draws(op) else ""),
            _is_same,
            given=given,
        )


_HANDLES = (tf.resource, tf.variant)


def _is_start(op: tf.Operation) -> bool:
    """Whether tf.gradients starts from an op."""
    return op.name.rpartition("/")[2].startswith("grad_ys_")


def _is_given(op: tf.Operation) -> bool:
    return op.type == "Identity"


def _tensor(what: Any) -> tf.Tensor | None:
    """Returns what is differentiated as a tensor."""
    if what is None or tf.is_symbolic_tensor(what):
        return what
    return tf.convert_to_tensor(what)


def _is_same(op: tf.Operation) -> bool:
    """Whether an op communicates, and all replicas receive the same."""
    if op.type != placeholder.TYPE:
        return False
    call = placeholder.call_of(op.get_attr("token"))
    return call is not None and bool(call.same_for_all(len(op.outputs)))
