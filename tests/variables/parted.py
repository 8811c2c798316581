# SPDX-License-Identifier: Apache-2.0
"""Creates partitioned variables without a strategy; shared by the tests of parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import replicator
from replicator.graph.passes.rows import Parts
from replicator.variables.chooser import Description, VariableFacts
from replicator.variables.placement import Mirrored, Owned, Placement


@dataclasses.dataclass
class InParts:
    """Divides each variable that has an axis, unevenly, and deals the parts.

    Attributes:
        num_replicas: The owners of the parts, in turn; every third part is mirrored.
        axis: The axis along which variables are divided; those without it stay whole.
        count: The maximum number of parts.
    """

    num_replicas: int
    axis: int = 0
    count: int = 3

    def choose(self, facts: VariableFacts) -> Description | None:
        """Returns the parts of a variable."""
        if len(facts.shape) <= self.axis or facts.shape[self.axis] < 2:
            return None
        size = facts.shape[self.axis]
        count = min(self.count, size)
        sizes = [1] * (count - 1) + [size - count + 1]
        return chosen(self.axis, sizes, [self._placement(k) for k in range(count)])

    def _placement(self, k: int) -> Placement:
        return Mirrored() if k % 3 == 1 else Owned((k + 1) % self.num_replicas)


@dataclasses.dataclass
class As:
    """Divides all variables in one way.

    Attributes:
        what: The parts.
    """

    what: Description

    def choose(self, facts: VariableFacts) -> Description | None:
        """Returns the parts."""
        return self.what


def chosen(
    axis: int, sizes: Sequence[int], placements: Sequence[Placement]
) -> Description:
    """Returns a choice of parts."""
    layout, parts = Parts(axis, tuple(sizes)), tuple(map(Description, placements))
    return Description(Mirrored(), layout=layout, parts=parts)


def replicas(count: int, chooser: Any = None, **options: Any) -> Any:
    """Returns a Replicator of some CPUs, with variables partitioned by a chooser.

    Args:
        count: The number of replicas.
        chooser: Chooses the parts; None: three, along axis 0.
        **options: Options of the Replicator.
    """
    repl = replicator.Replicator([f"CPU:{r}" for r in range(count)], **options)
    decisions = repl._settings.factory._decisions
    decisions._strategy = chooser or InParts(count)
    return repl


def one_device() -> Any:
    """Returns the reference: one replica, with whole variables."""
    return replicator.Replicator(["CPU:0"], variables="mirrored")
