# SPDX-License-Identifier: Apache-2.0
"""Node: how one variable is placed and kept equal on all replicas, as plain data.

Nodes are validated on construction, so that all other code can rely on them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import tensorflow as tf

from replicator import arguments, errors
from replicator.variables.synchronizer import Synchronizer, error


@dataclasses.dataclass(frozen=True)
class Node:
    """How one variable, or one part of it, is placed and kept equal.

    Example:
        >>> ps = [replicator.strategy.PSSynchronizer(f"CPU:{k}") for k in range(2)]
        >>> node = replicator.strategy.Node.in_parts("table", 0, [3, 2], ps)
        >>> node.partitioner, [part.name for part in node.parts]
        ('2', ['table/part_0', 'table/part_1'])

    Attributes:
        name: The variable's path.
        synchronizer: How it is kept equal; None if its parts have synchronizers.
        parts: One Node per part; empty if the variable is whole.
        axis: The axis along which it is split; None if it is whole.
        sizes: The sizes of the parts along the axis; empty if they are as even as
            possible, the larger ones first.
        shape: Its shape, if known; this and the following fields do not count in
            comparisons.
        dtype: The name of its dtype; "" if not known.
        sent: The bytes that are sent for it in a step, if known.
        seconds: The predicted time of that and of its update, if known.
    """

    name: str
    synchronizer: Synchronizer | None = None
    parts: tuple[Node, ...] = ()
    axis: int | None = None
    sizes: tuple[int, ...] = ()
    shape: tuple[int, ...] | None = dataclasses.field(default=None, compare=False)
    dtype: str = dataclasses.field(default="", compare=False)
    sent: int | None = dataclasses.field(default=None, compare=False)
    seconds: float | None = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise error(
                f"a Node was given the name {errors.repr_of(self.name)}.",
                "pass the path of a variable.",
            )
        if not isinstance(self.synchronizer, Synchronizer | None):
            raise self._wrong(
                f"has the synchronizer {errors.repr_of(self.synchronizer)}",
                "pass a PSSynchronizer or an AllReduceSynchronizer.",
            )
        if self.synchronizer is None and not self.parts:
            raise self._wrong("has no synchronizer", "give it one, or parts.")
        self._check_parts()
        try:
            tf.as_dtype(self.dtype or "float32")
        except TypeError:
            raise self._wrong(
                f"has the dtype {errors.repr_of(self.dtype)}",
                "name one of TensorFlow's.",
            ) from None

    def _check_parts(self) -> None:
        """Raises StrategyError unless parts, axis and sizes are consistent."""
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "sizes", tuple(self.sizes))
        if bool(self.parts) != (self.axis is not None):
            raise self._wrong(
                "has parts without an axis, or an axis without parts", _PARTS
            )
        if not self.parts:
            if self.sizes:
                raise self._wrong("has sizes of parts but no parts", _PARTS)
            return
        if not arguments.is_whole(self.axis, 0, _MOST_AXES):
            raise self._wrong(
                f"is in parts along axis {errors.repr_of(self.axis)}",
                "axes are numbered from 0 on.",
            )
        if len(self.parts) < 2:
            raise self._wrong("has one part", _PARTS)
        if any(not isinstance(part, Node) or part.parts for part in self.parts):
            raise self._wrong(
                "has a part that is not a Node, or that has parts itself", _PARTS
            )
        if any(part.synchronizer is None for part in self.parts):
            raise self._wrong("has a part without a synchronizer", _PARTS)
        if self.sizes and len(self.sizes) != len(self.parts):
            raise self._wrong(
                f"has {len(self.parts)} parts of {len(self.sizes)} sizes", _PARTS
            )
        if not all(arguments.is_whole(size, 1) for size in self.sizes):
            raise self._wrong(f"has parts of sizes {self.sizes}", _PARTS)

    def _wrong(self, problem: str, fix: str) -> errors.StrategyError:
        return error(f"the node of {errors.repr_of(self.name)} {problem}.", fix)

    @classmethod
    def in_parts(
        cls,
        name: str,
        axis: int,
        sizes: Sequence[int],
        synchronizers: Sequence[Synchronizer],
    ) -> Node:
        """Returns the node of a variable in parts.

        Example:
            >>> ps = replicator.strategy.PSSynchronizer("CPU:0")
            >>> replicator.strategy.Node.in_parts("w", 1, [2, 2], [ps, ps]).partitioner
            '1,2'

        Args:
            name: The variable's path.
            axis: The axis along which it is split.
            sizes: The sizes of the parts along the axis.
            synchronizers: One per part.

        Raises:
            StrategyError: There are not as many synchronizers as sizes, or these do not
                make a node.
        """
        sizes, synchronizers = tuple(sizes), tuple(synchronizers)
        if len(sizes) != len(synchronizers):
            raise error(
                f"the node of {errors.repr_of(name)} has parts of sizes {list(sizes)} "
                f"and {len(synchronizers)} synchronizers.",
                _PARTS,
            )
        numbered = zip(range(len(sizes)), synchronizers, strict=True)
        parts = tuple(cls(f"{name}/part_{k}", how) for k, how in numbered)
        return cls(name, parts=parts, axis=axis, sizes=sizes)

    @property
    def partitioner(self) -> str:
        """The number of parts along each axis: "1,2".

        Ends at `axis` if the rank is unknown.

        Example:
            >>> ps = replicator.strategy.PSSynchronizer("CPU:0")
            >>> replicator.strategy.Node("w", ps).partitioner
            ''
        """
        if self.axis is None:
            return ""
        after = max(0, len(self.shape or ()) - self.axis - 1)
        counts = [1] * self.axis + [len(self.parts)] + [1] * after
        return ",".join(map(str, counts))

    @property
    def nbytes(self) -> int | None:
        """The size of the variable in bytes, if known.

        Example:
            >>> ps = replicator.strategy.PSSynchronizer("CPU:0")
            >>> replicator.strategy.Node("w", ps, shape=(2, 3), dtype="float32").nbytes
            24
        """
        if self.shape is None or not self.dtype:
            return None
        return math.prod(self.shape) * (tf.as_dtype(self.dtype).size or 0)

    def extents(self, size: int) -> tuple[int, ...]:
        """Returns the sizes of the parts along an axis of a given size.

        Example:
            >>> ps = replicator.strategy.PSSynchronizer("CPU:0")
            >>> replicator.strategy.Node.in_parts("w", 0, [2, 2], [ps, ps]).extents(4)
            (2, 2)

        Args:
            size: The size of the axis.

        Raises:
            StrategyError: The sizes do not add up, or there are more parts than
                elements.
        """
        sizes = self.sizes or even_sizes(size, len(self.parts))
        if 0 in sizes:
            raise self._wrong(
                f"has {len(sizes)} parts along axis {self.axis}, where the variable "
                f"has {size}",
                "give each part at least one element.",
            )
        if sum(sizes) != size:
            raise self._wrong(
                f"has parts of sizes {list(sizes)} along axis {self.axis}, where the "
                f"variable has {size}",
                "choose sizes that add up to the variable's.",
            )
        return sizes


_MOST_AXES = 254  # TensorFlow's limit
_PARTS = (
    "give a variable in parts an axis, two or more parts, a Node with a synchronizer "
    "for each, and either a positive size for each or none at all."
)


def even_sizes(size: int, count: int) -> tuple[int, ...]:
    """Returns part sizes that are as even as possible, the larger ones first."""
    return tuple(size // count + (k < size % count) for k in range(count))
