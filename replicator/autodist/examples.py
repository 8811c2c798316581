# SPDX-License-Identifier: Apache-2.0
"""What depends on the examples of a replica, in the graph that a function builds.

The kinds of losses and results follow from that graph as those of a session's do; it is
looked at where a gradient is taken, when what is differentiated is there already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, context, errors
from replicator.autodist import flows, losses
from replicator.autodist.kinds import Kind
from replicator.autodist.values import Values
from replicator.graph.ir import placeholder, shapes
from replicator.primitives import all_reduce


class Examples:
    """The examples of one replica.

    Args:
        replica: The replica, which is being built.
        given: What it has of them.
        declared: What the user says that losses are, "mean" or "sum", if anything.
    """

    def __init__(
        self,
        replica: context.ReplicaContext,
        given: Sequence[tf.Tensor],
        declared: str | None = None,
    ) -> None:
        self._replica, self._given, self._declared = replica, given, declared
        self._weights: dict[tuple[int, ...], tuple[Any, tf.Tensor]] = {}

    @property
    def are_split(self) -> bool:
        """Whether there are any."""
        return bool(self._given)

    def weight(self) -> tf.Tensor:
        """Returns what the gradient that is being taken weighs in the sum over all.

        Raises:
            UnsupportedError: That does not follow from what is differentiated.
        """
        replica = self._replica
        equal = tf.constant(1 / replica.num_replicas)
        if not self._given or replica.num_replicas == 1:
            return equal  # each does all of it
        found = _tf.differentiated()
        if found is None:
            raise losses.not_found("", errors.user_line())
        targets, given = ([_tensor(one) for one in part] for part in found)
        graph = tf.compat.v1.get_default_graph()
        key = (id(graph), *map(id, (*targets, *given)))
        if key not in self._weights:
            tensors = [one for one in (*targets, *given) if one is not None]
            kinds = self.kinds(tensors)
            loss = losses.find(kinds, targets, given, self._declared)
            made = equal if loss.kind is Kind.SAME else self._weight(loss)
            self._weights[key] = (found, made)  # ids are taken while these live
        return self._weights[key][1]

    def _weight(self, loss: losses.Loss) -> tf.Tensor:
        share = self._replica.weight
        if loss.over is None:
            has_any = tf.cast(share > 0, tf.float32)
            return has_any if loss.kind is Kind.SUM else share
        own = tf.where(share > 0, tf.cast(loss.over, tf.float32), 0.0)
        (total,) = all_reduce.combine([own], "sum", None)
        return tf.math.divide_no_nan(own, total)

    def kinds(self, tensors: Sequence[tf.Tensor]) -> Values:
        """Returns what finds the kinds of tensors of one graph, and of all before."""
        graph = tensors[0].graph
        if graph is self._replica.build.graph:
            own = {tensor.op: "value" for tensor in self._given}
            return Values(self._flow(tensors, own, {}))
        return Values(self._flow(tensors, *self._inputs(graph)))

    def _inputs(self, graph: Any) -> tuple[dict[tf.Operation, str], dict[int, Kind]]:
        """Returns which inputs of a function's graph differ, and the kinds of all.

        A function is called when its graph is there; of what it is given as arguments,
        the shapes have to tell.
        """
        given: dict[int, Kind] = {}
        captured = {id(inner): outer for outer, inner in graph.captures}
        for tensor in graph.inputs:
            outer = captured.get(id(tensor))
            if outer is not None:
                known = tf.is_symbolic_tensor(outer) and outer.graph is not graph
                given[id(tensor)] = (
                    self.kinds([outer]).of(outer) if known else Kind.SAME
                )
            elif tensor.shape.rank and shapes.sizes(tensor)[0] is None:
                given[id(tensor)] = Kind.ROWS
            else:
                same = tensor.dtype in (tf.resource, tf.variant, tf.bool)
                given[id(tensor)] = Kind.SAME if same else Kind.UNKNOWN
        own = {
            tensor.op: "shape" if given[id(tensor)] is Kind.COUNT else "value"
            for tensor in graph.inputs
            if given[id(tensor)] is not Kind.SAME
        }
        return own, given

    def _flow(
        self,
        tensors: Sequence[tf.Tensor],
        own: dict[tf.Operation, str],
        given: dict[int, Kind],
    ) -> flows.Flow:
        """Returns what differs of that on which tensors depend."""
        ops = flows.upstream(tensors, lambda op: op in own or _is_same(op))
        return flows.flow(
            ops,
            lambda op: own.get(op) or ("value" if flows.draws(op) else ""),
            _is_same,
            given=given,
        )


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
