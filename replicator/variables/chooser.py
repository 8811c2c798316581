# SPDX-License-Identifier: Apache-2.0
"""The interface by which a variable factory asks a strategy about each variable.

The factory and the variables know no more of strategies than this: facts go in, a
decision comes out.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from replicator.variables.placement import Placement
from replicator.variables.synchronizer import AllReduce, Synchronizer


class SparseGradients(dict[str | None, bool]):
    """Whether the gradient of each variable is sparse, by the variable's key."""


@dataclasses.dataclass(frozen=True)
class VariableFacts:
    """What is known of a variable when its placement is decided.

    Builders receive these. To see what a builder does with a model that does not exist
    yet, write them down:

    Example:
        >>> from replicator import strategy
        >>> facts = [
        ...     strategy.VariableFacts("table", (10, 4), "float32", nbytes=160),
        ...     strategy.VariableFacts("bias", (4,), "float32", order=1, nbytes=16),
        ... ]
        >>> devices = strategy.Resources(("CPU:0", "CPU:1"))
        >>> built = strategy.PSLoadBalancing().build(facts, devices)
        >>> [node.synchronizer.reduction_destination for node in built.nodes]
        ['CPU:0', 'CPU:1']

    Attributes:
        path: Its name with the scopes around it, e.g. "dense/kernel".
        shape: Its shape.
        dtype: The name of its dtype, e.g. "float32".
        trainable: Whether optimizers update it.
        sparse: Whether its gradient is sparse on any replica; None if that is unknown
            because no step has been built yet.
        order: The count of earlier variables that a strategy was asked about.
        nbytes: Its size in bytes.
        whole: Whether it already exists, so that it cannot be divided any more.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    sparse: bool | None = None
    order: int = 0
    nbytes: int = 0
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a variable that is created in parts.

    Attributes:
        size: Its size along the axis of its `Chosen`.
        placement: Its placement.
        synchronizer: How its gradient is made equal on all replicas.
    """

    size: int
    placement: Placement
    synchronizer: Synchronizer = AllReduce()


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A decision on a variable.

    Attributes:
        placement: Its placement; for a variable in parts, that of anything that belongs
            to the variable but to no part.
        synchronizer: How its gradient is made equal on all replicas.
        parts: Its parts along an axis, in order; empty if it is whole. Their sizes add
            up to that of the axis.
        axis: The axis along which it is in parts; None if it is whole.
        later: Whether the decision is made when a step is built. Until then the
            variable is placed as if there were no strategy, whatever `placement` says.
        may_divide: Whether that later decision may divide it into parts.
    """

    placement: Placement
    synchronizer: Synchronizer = AllReduce()
    parts: tuple[Part, ...] = ()
    axis: int | None = None
    later: bool = False
    may_divide: bool = False


class Chooser(Protocol):
    """Decides on each variable, in the order of creation."""

    def choose(self, facts: VariableFacts) -> Chosen | None:
        """Returns the decision on a variable; None: as without a strategy."""
