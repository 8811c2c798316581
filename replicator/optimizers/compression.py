# SPDX-License-Identifier: Apache-2.0
"""Which compressor the gradient of each variable has, and what it remembers.

Used by gradients.py. A variable's synchronizer says which; what says nothing of it has
that of the optimizer. Residuals are kept per variable, whatever travels together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.compressors import reducing, specs
from replicator.compressors.base import Compressor
from replicator.compressors.memory import Memory, Place
from replicator.graph.ir.placeholder import OperandPolicy
from replicator.optimizers.accumulators import Gradient, facts_of
from replicator.primitives import all_reduce
from replicator.variables.replicated import ReplicatedVariable, plain


class Compression:
    """What compresses the gradients of one optimizer.

    Args:
        compressor: Of variables whose synchronizers name none.
        name: The optimizer's, for names and messages.

    Attributes:
        memory: What compressors keep from step to step, for checkpoints.
        is_tracked: Whether these hold it.
    """

    def __init__(self, compressor: Compressor | None, name: str) -> None:
        self.memory = Memory()
        self.is_tracked = False
        self._compressor = compressor
        self._name = name
        self._places: dict[Hashable, Place] = {}

    def of(
        self, variables: Sequence[Any], gradients: Sequence[Gradient]
    ) -> list[Compressor | None] | None:
        """Returns the compressor of each gradient, or None if none is compressed.

        Raises:
            ArgumentError: A variable's synchronizer names one that there is not.
        """
        chosen = [
            compressor if reducing.can_compress(compressor, gradient) else None
            for compressor, gradient in zip(
                map(self._of, variables), gradients, strict=True
            )
        ]
        return chosen if any(one is not None for one in chosen) else None

    def is_asked_for(self, variables: Sequence[Any]) -> bool:
        """Whether the gradient of any of some variables is to be compressed."""
        return any(self._of(variable) is not None for variable in variables)

    def _of(self, variable: Any) -> Compressor | None:
        """Returns the compressor of a variable's gradient."""
        inside = plain(variable)
        named: Any = None
        if isinstance(inside, ReplicatedVariable):
            named = inside.storage.synchronizer.compressor
        if named is None or named == "":
            return self._compressor
        return specs.compressor(f"the synchronizer of {inside.name}", named)

    def place(
        self,
        key: Hashable,
        op: str,
        gradients: Sequence[Gradient],
        creating: Callable[[], Any],
    ) -> Place:
        """Returns where what is remembered of some gradients is.

        Args:
            key: Tells what they are gradients of; all steps that pass gradients of the
                same share it.
            op: "mean" or "sum" over the replicas.
            gradients: The gradients.
            creating: Returns a block in which variables are created.
        """
        if key not in self._places:
            facts = repr((op, *map(facts_of, gradients)))
            group = self.memory.group(facts)
            self._places[key] = Place(group, self._name, creating)
        return self._places[key]


@dataclasses.dataclass(frozen=True)
class Reducer:
    """Reduces gradients of some variables over all replicas, each where it is needed.

    Attributes:
        compression: What compresses them.
        key: Tells the variables, and where they are, from others.
        policies: How each gradient is communicated.
        compressors: Of each gradient; None: none is compressed.
        creating: Returns a block in which variables are created.
        scale: Returns what the gradients are multiplied by for a while, or None.
    """

    compression: Compression
    key: Hashable
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
            gradients: This replica's.
            op: "mean" or "sum".
            weight: What they weigh in the mean, or None.
        """
        if self.compressors is None:
            return all_reduce.combine(gradients, op, weight, self.policies)
        place = self.compression.place(self.key, op, gradients, self.creating)
        members = context.require("a compressor").build.world.everyone
        call = reducing.Call(op, members, weight, place, scale=self.scale())
        return reducing.reduce(call, gradients, self.compressors, self.policies)
