# SPDX-License-Identifier: Apache-2.0
"""RandomAxisPartitionAR: parts along a random axis, each all-reduced."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from replicator import arguments, errors
from replicator.strategy.builders.partitioned_ar import PartitionedAR
from replicator.strategy.builders.parts import divisor
from replicator.strategy.facts import VariableFacts
from replicator.variables.synchronizer import error


class RandomAxisPartitionAR(PartitionedAR):
    """Like PartitionedAR, but along a random axis of those longer than 1.

    Along axis 0 if the gradient is sparse. Takes the arguments of `AllReduce`, and a
    seed.

    Example:
        >>> facts = replicator.strategy.VariableFacts(
        ...     "w", (1, 6), "float32", sparse=False, nbytes=24)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> builder = replicator.strategy.RandomAxisPartitionAR(seed=1)
        >>> builder.build([facts], devices).node("w").partitioner
        '1,2'

    Args:
        chunk_size: As for `AllReduce`.
        seed: The seed of the draws; an int.
        all_reduce_spec: As for `AllReduce`.
        compressor: As for `AllReduce`.

    Raises:
        StrategyError: An option has an invalid value.
    """

    may_divide = True

    def __init__(
        self,
        chunk_size: int = 128,
        seed: int = 0,
        all_reduce_spec: str = "NCCL",
        compressor: Any = None,
    ) -> None:
        super().__init__(chunk_size, all_reduce_spec, compressor)
        if not arguments.is_whole(seed):
            raise error(
                f"RandomAxisPartitionAR was given seed={errors.repr_of(seed)}.",
                "it is an int, at least 0.",
            )
        self.seed = seed

    def cutter(self) -> Callable[[VariableFacts], tuple[int, int]]:
        """Returns a function that draws a variable's axis; see `PartitionedAR.cutter`.

        Example:
            >>> facts = replicator.strategy.VariableFacts(
            ...     "w", (6, 1), "float32", sparse=False)
            >>> replicator.strategy.RandomAxisPartitionAR().cutter()(facts)
            (0, 2)
        """
        draws = random.Random(self.seed)

        def cut(variable: VariableFacts) -> tuple[int, int]:
            axes = [axis for axis, size in enumerate(variable.shape) if size > 1]
            if len(axes) > 1 and variable.sparse:
                axes = axes[:1] if axes[0] == 0 else []
            if not axes:
                return 0, 1
            axis = draws.choice(axes)
            return axis, divisor(variable.shape[axis])

        return cut
