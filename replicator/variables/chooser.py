# SPDX-License-Identifier: Apache-2.0
"""What is decided on a variable, and the interface by which a strategy is asked.

Variables and their factory know no more of strategies than this: facts go in, a
description comes out.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from replicator.graph.ir.placeholder import OperandPolicy
from replicator.graph.passes.rows import Parts
from replicator.variables.placement import Placement
from replicator.variables.synchronizer import (
    ALGORITHMS,
    AllReduceSynchronizer,
    Synchronizer,
)


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
class Description:
    """Where a variable is and how its gradients are made equal: all that is decided.

    A variable holds its description, which is replaced when it moves.

    Attributes:
        placement: Its placement; for a variable in parts, that of anything that belongs
            to the variable but to no part.
        synchronizer: How its gradients are made equal on all replicas; None where no
            strategy has decided: as the Replicator's options say.
        layout: How it is divided into parts; None if it is whole.
        parts: The descriptions of its parts, in order.
        undecided: Whether a strategy decides on it when a step is built. Until then the
            variable is placed as if there were no strategy.
    """

    placement: Placement
    synchronizer: Synchronizer | None = None
    layout: Parts | None = None
    parts: tuple[Description, ...] = ()
    undecided: bool = False

    def policy(self, key: str) -> OperandPolicy:
        """Returns how values reduced for the variable with a key are communicated."""
        owner, how = self.placement.owner, self.synchronizer
        if isinstance(how, AllReduceSynchronizer):  # only its group shares a bucket
            return OperandPolicy(key, owner, ALGORITHMS.get(how.spec), str(how.group))
        return OperandPolicy(key, owner)

    @property
    def slot(self) -> Description:
        """The description of an optimizer's slot that is divided like the variable."""
        parts = tuple(
            dataclasses.replace(part, placement=part.placement.slot, undecided=False)
            for part in self.parts
        )
        return dataclasses.replace(self, parts=parts, undecided=False)

    def in_one_part(self, size: int) -> Description:
        """Returns the description of a variable that may be divided later.

        Args:
            size: The size of its first axis.
        """
        return Description(self.placement, layout=Parts(0, (size,)), parts=(self,))


@dataclasses.dataclass(frozen=True)
class Later:
    """A strategy decides when a step is built.

    Attributes:
        may_divide: Whether it may then divide the variable into parts.
    """

    may_divide: bool = False


class Chooser(Protocol):
    """Decides on each variable, in the order of creation."""

    def choose(self, facts: VariableFacts) -> Description | Later | None:
        """Returns the decision on a variable; None: as without a strategy."""
