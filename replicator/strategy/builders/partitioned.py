# SPDX-License-Identifier: Apache-2.0
"""Builders of variables in parts: by parameter servers, all-reduced, or by rules."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from replicator import arguments, errors
from replicator.strategy.builder import Builder
from replicator.strategy.builders.all_reduce import AllReduce
from replicator.strategy.builders.ps import PS
from replicator.strategy.facts import Resources, VariableFacts
from replicator.strategy.nodes import Node, even_sizes
from replicator.variables.default_placement import Loads
from replicator.variables.synchronizer import PSSynchronizer, Synchronizer, error


class Partitioned(Builder):
    """Splits variables along an axis, each part on the replica with the fewest bytes.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (2, 5), "float32", nbytes=40)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> builder = replicator.strategy.Partitioned(axis=-1)
        >>> builder.build([facts], devices).node("w").sizes
        (3, 2)

    Args:
        axis: The axis; counted from the end if negative.
        parts: The number of parts; None: one per replica. At most one per element along
            the axis.

    Raises:
        StrategyError: An option has an invalid value.
    """

    def __init__(self, axis: int = 0, parts: int | None = None) -> None:
        if not isinstance(axis, int) or isinstance(axis, bool):
            raise _wrong("axis", axis, "it is an int.")
        if parts is not None and not arguments.is_whole(parts, 1):
            raise _wrong("parts", parts, "it is an int, at least 1, or None.")
        self.axis = axis
        self.parts = parts

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes with parts on the replicas' devices; see `Builder.nodes`."""
        loads = Loads(resources.devices)
        for variable in variables:
            rank = len(variable.shape)
            if not -rank <= self.axis < rank:
                raise error(
                    f"variable {variable.path} is to be in parts along axis "
                    f"{self.axis}, and its shape is {list(variable.shape)}.",
                    "name an axis that it has, or give it another rule.",
                )
            axis = self.axis % rank
            count = min(self.parts or resources.num_replicas, variable.shape[axis])
            yield node_in_parts(
                variable,
                axis,
                count,
                lambda nbytes: PSSynchronizer(loads.least(nbytes)),
            )


def _wrong(name: str, value: Any, fix: str) -> errors.StrategyError:
    return error(f"Partitioned was given {name}={errors.repr_of(value)}.", fix)


def divisor(size: int) -> int:
    """Returns the smallest divisor of a size, from 2 on; 1 for a size below 2."""
    if size < 2:
        return 1
    candidate = 2
    while candidate * candidate <= size:
        if size % candidate == 0:
            return candidate
        candidate += 1
    return size


def no_divisor(size: int) -> int:
    """Returns the smallest number from 2 on that does not divide a size, or the size.

    That many parts are uneven, unless there are fewer elements than that.
    """
    if size < 2:
        return 1
    candidate = 2
    while size % candidate == 0:
        candidate += 1
    return min(candidate, size)


def node_in_parts(
    variable: VariableFacts,
    axis: int,
    count: int,
    synchronizer: Callable[[int], Synchronizer],
) -> Node:
    """Returns the node of a variable in parts, or a whole node for a single part.

    Args:
        variable: The variable.
        axis: The axis to split.
        count: The number of parts; as even as possible, the larger ones first.
        synchronizer: Takes the bytes of a part, in order, and returns its synchronizer.
    """
    if count < 2:
        return Node(variable.path, synchronizer(variable.nbytes))
    size = variable.shape[axis]
    sizes = even_sizes(size, count)
    synchronizers = [synchronizer(variable.nbytes // size * extent) for extent in sizes]
    return Node.in_parts(variable.path, axis, sizes, synchronizers)


class PartitionedPS(PS):
    """Splits variables along axis 0, each part on the CPU device with the fewest bytes.

    The number of parts is the smallest divisor of the size, from 2 on; scalars and
    variables with one row stay whole. Takes the arguments of `PS`.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (6, 2), "float32", nbytes=48)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> built = replicator.strategy.PartitionedPS().build([facts], devices)
        >>> built.node("w").sizes
        (3, 3)
    """

    def count(self, size: int) -> int:
        """Returns the number of parts for an axis of this size.

        Example:
            >>> [replicator.strategy.PartitionedPS().count(n) for n in (1, 6, 7)]
            [1, 2, 7]

        Args:
            size: The size of the axis.
        """
        return divisor(size)

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes with parts on the least loaded devices; see `Builder.nodes`."""
        loads = Loads(resources.cpus)
        for variable in variables:
            count = self.count(variable.shape[0]) if variable.shape else 1
            yield node_in_parts(
                variable, 0, count, lambda nbytes: self.on(loads.least(nbytes))
            )


class UnevenPartitionedPS(PartitionedPS):
    """Like PartitionedPS, with a number of parts that does not divide the size.

    It is the smallest such number, from 2 on; two rows make two parts. Takes the
    arguments of `PS`.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (6, 2), "float32", nbytes=48)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> built = replicator.strategy.UnevenPartitionedPS().build([facts], devices)
        >>> built.node("w").sizes
        (2, 2, 1, 1)
    """

    def count(self, size: int) -> int:
        """Returns the number of parts for an axis of this size.

        Example:
            >>> [replicator.strategy.UnevenPartitionedPS().count(n) for n in (2, 6, 7)]
            [2, 4, 2]

        Args:
            size: The size of the axis.
        """
        return no_divisor(size)


class PartitionedAR(AllReduce):
    """Splits variables along axis 0 like PartitionedPS; each part is all-reduced.

    Takes the arguments of `AllReduce`; a chunk counts parts.

    Example:
        >>> facts = replicator.strategy.VariableFacts("w", (6, 2), "float32", nbytes=48)
        >>> devices = replicator.strategy.Resources(("CPU:0", "CPU:1"))
        >>> builder = replicator.strategy.PartitionedAR(chunk_size=1)
        >>> parts = builder.build([facts], devices).node("w").parts
        >>> [part.synchronizer.group for part in parts]
        [0, 1]
    """

    def nodes(
        self, variables: Iterable[VariableFacts], resources: Resources
    ) -> Iterator[Node | None]:
        """Yields nodes with parts; see `Builder.nodes`."""
        index, cut = itertools.count(), self.cutter()
        for variable in variables:
            axis, count = cut(variable)
            yield node_in_parts(variable, axis, count, lambda _: self.of(next(index)))

    def cutter(self) -> Callable[[VariableFacts], tuple[int, int]]:
        """Returns a function that picks a variable's axis and number of parts.

        Example:
            >>> facts = replicator.strategy.VariableFacts("w", (9, 2), "float32")
            >>> replicator.strategy.PartitionedAR().cutter()(facts)
            (0, 3)
        """

        def cut(variable: VariableFacts) -> tuple[int, int]:
            return 0, divisor(variable.shape[0]) if variable.shape else 1

        return cut


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
