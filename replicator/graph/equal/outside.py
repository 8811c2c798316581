# SPDX-License-Identifier: Apache-2.0
"""What is known of the values that a level of a step is given from around it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from replicator import _tf
from replicator.graph.equal.counterparts import hold_the_same
from replicator.graph.ir import switching
from replicator.graph.ir.captures import Captures

Column: TypeAlias = tuple[tf.Tensor, ...]  # one per replica
Ops: TypeAlias = tuple[tf.Operation, ...]  # one per replica


class Level(Protocol):
    """What is asked of the level on which a function is called; see equality.py."""

    writes: list[dict[int, list[tf.Operation]]]

    def resource(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns the replicated variable behind a handle, or any other resource."""

    def version(self, r: int, op: tf.Operation, tensor: tf.Tensor) -> Any:
        """Returns what is equal where a resource was written as often before an op."""

    def difference(self, column: Column) -> Ops | None:
        """Returns the ops by which values differ, None if they are equal."""


class Inputs:
    """What is known of the values that a level is given from outside.

    Args:
        variable_of: Returns the replicated variable behind a handle, or None.
        flow: What is in control flow of TensorFlow 1.
        own: Where other processes build all other replicas: the ids of the tensors that
            the only one here is given for itself.
    """

    flow = switching.NONE

    def __init__(
        self,
        variable_of: Callable[[tf.Tensor], Any],
        flow: switching.Flow,
        own: Container[int] | None = None,
    ) -> None:
        self.flow = flow
        self._own = own
        self._variable_of = variable_of
        self._captures = Captures()

    def resource(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns the replicated variable behind a handle, or any other resource."""
        outermost = self._captures.outermost(self.flow.handle(tensor))
        variable = self._variable_of(outermost)
        return outermost if variable is None else variable

    def version(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns what is equal where a resource was written as often before."""
        return None

    def difference(self, column: Column) -> tuple[bool, Ops | None]:
        """Returns whether something is known, and by what the values differ if so."""
        if self._own is not None:
            return self._of_others(column[0])
        if all(tensor is column[0] for tensor in column):
            return True, None
        outside = [self._captures.outermost(tensor) for tensor in column]
        return hold_the_same(outside), None

    def _of_others(self, tensor: tf.Tensor) -> tuple[bool, Ops | None]:
        """As `difference`, of the tensors that other processes have in its place."""
        if self._own is not None and id(tensor) in self._own:
            return True, (tensor.op,)
        shared = not tf.is_symbolic_tensor(tensor) or tensor.op.type == "Placeholder"
        return shared, None


class Arguments(Inputs):
    """What is known of the arguments of functions that the replicas' ops call.

    Args:
        outer: The level on which they are called.
        ops: The ops that call them.
        graphs: The functions.
        offset: How many of the inputs of an op are not the function's.
        place: Tells the functions of one op apart.
        stays: Of a loop, which arguments are equal at the start of each turn.
    """

    def __init__(
        self,
        outer: Level,
        ops: Ops,
        graphs: Sequence[Any],
        offset: int,
        place: Any,
        stays: Sequence[bool] | None,
    ) -> None:
        self._outer = outer
        self._ops = ops
        self._offset = offset
        self._place = place
        self._stays = stays
        self._index = [
            {id(tensor): k for k, tensor in enumerate(graph.inputs)} for graph in graphs
        ]

    def _given(self, r: int, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns what an argument is on the level around."""
        k = self._index[r].get(id(tensor))
        inputs = self._ops[r].inputs
        if k is None or k + self._offset >= len(inputs):
            return None
        return inputs[k + self._offset]

    def resource(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns the replicated variable behind a handle, or any other resource."""
        given = self._given(r, tensor)
        return tensor if given is None else self._outer.resource(r, given)

    def version(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns what is equal where a resource was written as often before."""
        given = self._given(r, tensor)
        if given is None:
            return None
        outside = self._outer.version(r, self._ops[r], given)
        key = id(self._outer.resource(r, given))
        if self._ops[r] not in self._outer.writes[r].get(key, ()):
            return outside
        return outside, self._place

    def difference(self, column: Column) -> tuple[bool, Ops | None]:
        """Returns whether something is known, and by what the values differ if so."""
        given = [self._given(r, tensor) for r, tensor in enumerate(column)]
        if any(tensor is None for tensor in given):
            return False, None
        if self._stays is None:
            return True, self._outer.difference(tuple(given))
        places = [self._index[r][id(tensor)] for r, tensor in enumerate(column)]
        if len(set(places)) == 1:
            return True, None if self._stays[places[0]] else self._ops
        if all(self._is_captured(r, place) for r, place in enumerate(places)):
            return True, self._outer.difference(tuple(given))
        return True, self._ops

    def _is_captured(self, r: int, place: int) -> bool:
        """Whether an argument of a loop is the same in each turn."""
        body = _tf.called_graphs(self._ops[r])[1][1]
        return body.outputs[place] is body.inputs[place]
