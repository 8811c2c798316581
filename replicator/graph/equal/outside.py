# SPDX-License-Identifier: Apache-2.0
"""What is known of the values that enter a level of a step from outside it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, TypeAlias

import tensorflow as tf

from replicator._tf import functions
from replicator.graph.ir.captures import Captures

Column: TypeAlias = tuple[tf.Tensor, ...]  # one per replica
Ops: TypeAlias = tuple[tf.Operation, ...]  # one per replica


class Level(Protocol):
    """The calling level as seen from a function; implemented in equality.py."""

    writes: list[dict[int, list[tf.Operation]]]
    num_replicas: int | None

    def resource(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns the replicated variable behind a handle, or any other resource."""

    def version(self, r: int, op: tf.Operation, tensor: tf.Tensor) -> Any:
        """Returns the version of a resource that an op sees; every write changes it."""

    def difference(self, column: Column) -> Ops | None:
        """Returns the ops that make values differ, or None if they are equal."""


class Inputs:
    """What is known of the values that enter the outermost level.

    Args:
        variable_of: Returns the replicated variable behind a handle, or None.
        own: If other processes build all other replicas, the ids of the tensors that
            the only local replica has to itself.
        num_replicas: If other processes build some replicas, the number of all.
    """

    def __init__(
        self,
        variable_of: Callable[[tf.Tensor], Any],
        own: Container[int] | None = None,
        num_replicas: int | None = None,
    ) -> None:
        self.num_replicas = num_replicas
        self._own = own
        self._variable_of = variable_of
        self._captures = Captures()

    def resource(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns the replicated variable behind a handle, or any other resource."""
        outermost = self._captures.outermost(tensor)
        variable = self._variable_of(outermost)
        return outermost if variable is None else variable

    def version(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns the version of a resource at the start of the level."""
        return None

    def difference(self, column: Column) -> tuple[bool, Ops | None]:
        """Returns (whether equality is decided, the ops that make values differ)."""
        if self._own is not None:
            return self._of_others(column[0])
        if all(tensor is column[0] for tensor in column):
            return True, None
        outside = [self._captures.outermost(tensor) for tensor in column]
        return hold_the_same(outside), None

    def _of_others(self, tensor: tf.Tensor) -> tuple[bool, Ops | None]:
        """Like `difference`, against the corresponding tensors in other processes."""
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
        offset: How many leading inputs of an op are not passed to the function.
        place: Distinguishes the functions of one op.
        stays: For a loop, which arguments are equal at the start of each turn.
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
        self.num_replicas = outer.num_replicas
        self._outer = outer
        self._ops = ops
        self._offset = offset
        self._place = place
        self._stays = stays
        self._index = [
            {id(tensor): k for k, tensor in enumerate(graph.inputs)} for graph in graphs
        ]

    def _given(self, r: int, tensor: tf.Tensor) -> tf.Tensor | None:
        """Returns the tensor that the calling op passes as an argument."""
        k = self._index[r].get(id(tensor))
        inputs = self._ops[r].inputs
        if k is None or k + self._offset >= len(inputs):
            return None
        return inputs[k + self._offset]

    def resource(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns the replicated variable behind a handle, or any other resource."""
        operand = self._given(r, tensor)
        return tensor if operand is None else self._outer.resource(r, operand)

    def version(self, r: int, tensor: tf.Tensor) -> Any:
        """Returns the version of a resource at the start of the function."""
        operand = self._given(r, tensor)
        if operand is None:
            return None
        outside = self._outer.version(r, self._ops[r], operand)
        key = id(self._outer.resource(r, operand))
        if self._ops[r] not in self._outer.writes[r].get(key, ()):
            return outside
        return outside, self._place

    def difference(self, column: Column) -> tuple[bool, Ops | None]:
        """Returns (whether equality is decided, the ops that make values differ)."""
        operands = [self._given(r, tensor) for r, tensor in enumerate(column)]
        if any(tensor is None for tensor in operands):
            return False, None
        if self._stays is None:
            return True, self._outer.difference(tuple(operands))
        places = [self._index[r][id(tensor)] for r, tensor in enumerate(column)]
        if len(set(places)) == 1:
            return True, None if self._stays[places[0]] else self._ops
        if all(self._is_captured(r, place) for r, place in enumerate(places)):
            return True, self._outer.difference(tuple(operands))
        return True, self._ops

    def _is_captured(self, r: int, place: int) -> bool:
        """Whether a loop passes an argument on unchanged."""
        body = functions.called_graphs(self._ops[r])[1][1]
        return body.outputs[place] is body.inputs[place]


_SMALL = 1024  # elements; larger eager tensors are not compared


def hold_the_same(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether small eager tensors have the same value."""
    first = tensors[0]
    for tensor in tensors:
        dtype = tensor.dtype
        numbers = dtype.is_floating or dtype.is_integer or dtype.is_complex
        if tf.is_symbolic_tensor(tensor) or not (numbers or dtype.is_bool):
            return False
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            return False
        if tensor.shape.num_elements() > _SMALL:
            return False
    return all(
        tensor.numpy().tobytes() == first.numpy().tobytes() for tensor in tensors
    )
