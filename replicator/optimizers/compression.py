"""Which compressor the gradient of each variable has, and what it remembers.

Used by gradients.py. A variable's synchronizer says which; what says nothing of it has
that of the optimizer. Residuals are kept per variable, whatever travels together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.compressors import reducing, specs
from replicator.compressors.base import Compressor
from replicator.compressors.memory import Memory, Place
from replicator.graph.ir.placeholder import OperandPolicy
from replicator.optimizers.accumulators import Gradient, facts_of
from replicator.variables.replicated import ReplicatedVariable, plain


class Compression:
    """What compresses the gradients of one optimizer.

    Args:
        compressor: Of variables whose synchronizers name none.
        name: The optimizer's, for names and messages.

    Attributes:
        memory: What compressors keep from step to step, for checkpoints.
    """

    def __init__(self, compressor: Compressor | None, name: str) -> None:
        self.memory = Memory()
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

    def _of(self, variable: Any) -> Compressor | None:
        """Returns the compressor of a variable's gradient."""
        inside = plain(variable)
        named: Any = None
        if isinstance(inside, ReplicatedVariable):
            named = inside.storage.synchronizer.compressor
        if named is None or named == "":
            return self._compressor
        return specs.compressor(f"the synchronizer of {inside.name}", named)

    def call(
        self,
        op: str,
        weight: tf.Tensor | None,
        key: Hashable,
        gradients: Sequence[Gradient],
        creating: Callable[[], Any],
        scale: tf.Tensor | None,
    ) -> reducing.Call:
        """Returns what is common to the gradients of one call of the optimizer.

        Args:
            op: "mean" or "sum" over the replicas.
            weight: What this replica's weigh in the mean, or None.
            key: Tells what they are gradients of; all steps that pass gradients of the
                same share what is remembered.
            gradients: The gradients.
            creating: Returns a block in which variables are created.
            scale: What the gradients are multiplied by for a while, or None.
        """
        if key not in self._places:
            facts = repr((op, *map(facts_of, gradients)))
            group = self.memory.group(facts)
            self._places[key] = Place(group, self._name, creating)
        replica = context.require(self._name)
        members = replica.build.world.everyone
        place = self._places[key]
        return reducing.Call(op, members, weight, place, scale=scale)

    def reduce(
        self,
        call: reducing.Call,
        gradients: Sequence[Gradient],
        compressors: Sequence[Compressor | None],
        policies: Sequence[OperandPolicy],
    ) -> list[Gradient]:
        """Reduces gradients over all replicas, each where it is needed."""
        return reducing.reduce(call, gradients, compressors, policies)
