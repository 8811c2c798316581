# SPDX-License-Identifier: Apache-2.0
"""Chooses the compressor of each variable's gradient and stores its memory.

Used by gradients.py. A variable's synchronizer names the compressor; if it names none,
the optimizer's is used. Residuals are stored per variable, whichever gradients share
messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.compressors import reducing, specs
from replicator.compressors.base import Compressor
from replicator.compressors.memory import Memory, StateStore
from replicator.graph.ir.placeholder import OperandPolicy
from replicator.optimizers.accumulators import Gradient, facts_of
from replicator.primitives import all_reduce
from replicator.variables.replicated import ReplicatedVariable, plain


class Compression:
    """The compressors of one optimizer's gradients, and their memory.

    Args:
        compressor: Compresses gradients whose synchronizers name no compressor.
        name: The optimizer's name, for names and messages.

    Attributes:
        memory: What compressors keep from step to step, for checkpoints.
        is_tracked: Whether the optimizer's checkpoints hold the memory.
    """

    def __init__(self, compressor: Compressor | None, name: str) -> None:
        self.memory = Memory()
        self.is_tracked = False
        self._compressor = compressor
        self._name = name
        self._places: dict[Hashable, tuple[Hashable, StateStore]] = {}

    def of(
        self, variables: Sequence[Any], gradients: Sequence[Gradient]
    ) -> list[Compressor | None] | None:
        """Returns the compressor of each gradient, or None if none is compressed.

        Raises:
            ArgumentError: A variable's synchronizer names an unknown compressor.
        """
        compressors = [
            compressor if reducing.can_compress(compressor, gradient) else None
            for compressor, gradient in zip(
                map(self.compressor_of, variables), gradients, strict=True
            )
        ]
        return compressors if any(c is not None for c in compressors) else None

    def is_asked_for(self, variables: Sequence[Any]) -> bool:
        """Whether any of these variables has its gradient compressed."""
        return any(self.compressor_of(variable) is not None for variable in variables)

    def compressor_of(self, variable: Any) -> Compressor | None:
        """Returns the compressor of a variable's gradient, if any."""
        inner = plain(variable)
        how = None
        if isinstance(inner, ReplicatedVariable):
            how = inner.description.synchronizer
        if how is None or how.compressor == "":
            return self._compressor
        return specs.compressor(f"the synchronizer of {inner.name}", how.compressor)

    def place(
        self,
        key: Hashable,
        shapes: Hashable,
        op: str,
        gradients: Sequence[Gradient],
        creating: Callable[[], Any],
    ) -> StateStore:
        """Returns the store that holds the memory of some gradients.

        Args:
            key: Identifies the variables; all steps that pass gradients of the same
                variables share the place.
            shapes: The shapes of the pieces of these variables. Once a strategy has
                divided a variable, the place is another: nothing has been remembered,
                as no step was built before.
            op: "mean" or "sum" over the replicas.
            gradients: The gradients.
            creating: Returns a block in which variables are created.
        """
        old_shapes, place = self._places.get(key, (None, None))
        if place is None or shapes != old_shapes:
            if place is not None:
                self.memory.forget(place.group)
            facts = repr((op, *map(facts_of, gradients)))
            place = StateStore(self.memory.group(facts), self._name, creating)
            self._places[key] = shapes, place
        return place


@dataclasses.dataclass(frozen=True)
class Reducer:
    """Reduces some variables' gradients over all replicas, to where they are needed.

    Attributes:
        compression: The optimizer's compression.
        key: Identifies the variables and where they are.
        shapes: The shapes of the pieces of the variables.
        policies: How each gradient is communicated.
        compressors: The compressor of each gradient; None: none is compressed.
        creating: Returns a block in which variables are created.
        scale: Returns the loss scale, by which the gradients are multiplied, or None.
    """

    compression: Compression
    key: Hashable
    shapes: Hashable
    policies: Sequence[OperandPolicy]
    compressors: Sequence[Compressor | None] | None
    creating: Callable[[], Any]
    scale: Callable[[], tf.Tensor | None]

    @property
    def compresses(self) -> bool:
        """Whether any of the gradients is compressed."""
        return self.compressors is not None

    def __call__(
        self, gradients: Sequence[Gradient], op: str, weight: Any = None
    ) -> list[Gradient]:
        """Returns the reduced gradients.

        Args:
            gradients: This replica's gradients.
            op: "mean" or "sum".
            weight: This replica's weight in the mean, or None.
        """
        if self.compressors is None:
            return all_reduce.combine(gradients, op, weight, self.policies)
        place = self.compression.place(
            self.key, self.shapes, op, gradients, self.creating
        )
        members = context.require("a compressor").build.world.replica_ids
        call = reducing.ReduceArguments(op, members, weight, place, scale=self.scale())
        return reducing.reduce(call, gradients, self.compressors, self.policies)
