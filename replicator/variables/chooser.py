# SPDX-License-Identifier: Apache-2.0
"""What decides where a variable is and how it is kept equal, as its factory asks it.

A strategy says so per variable; the factory and the variables know of strategies only
what is here: facts go in, a choice comes out.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from replicator.variables.placement import Placement
from replicator.variables.synchronizer import AllReduce, Synchronizer

SPARSE = "sparse gradients"  # a finding of builds: whether it is, by variables' keys


@dataclasses.dataclass(frozen=True)
class VariableFacts:
    """What is known of a variable when it is decided where it is.

    Attributes:
        path: Its name with the scopes around it, "dense/kernel".
        shape: Its shape.
        dtype: The name of its dtype.
        trainable: Whether optimizers update it.
        sparse: Whether its gradient is sparse, on any replica; None if that is not
            known, because no step was built yet.
        order: How many variables that a strategy is asked for were created before it.
        nbytes: Its size.
        whole: Whether it was created already, and so cannot be in parts any more.
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
        size: Its extent along the axis of its `Chosen`.
        placement: Where it is.
        synchronizer: How its gradient is made equal.
    """

    size: int
    placement: Placement
    synchronizer: Synchronizer = AllReduce()


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What was decided for a variable.

    Attributes:
        placement: Where it is; of a variable in parts, where what is not part of it
            would be.
        synchronizer: How its gradient is made equal.
        parts: Its parts along an axis, in order; empty if it is whole. Their sizes add
            up to that of the axis.
        axis: Along which it is in parts; None if it is whole.
        later: Whether it will be decided when a step is built. Until then it is as it
            would be without a strategy, whatever the placement says.
        may_divide: Whether it may be in parts then.
    """

    placement: Placement
    synchronizer: Synchronizer = AllReduce()
    parts: tuple[Part, ...] = ()
    axis: int | None = None
    later: bool = False
    may_divide: bool = False


class Chooser(Protocol):
    """Decides for each variable, in the order in which they are created."""

    def choose(self, facts: VariableFacts) -> Chosen | None:
        """Returns what is decided for a variable; None: as without a strategy."""
