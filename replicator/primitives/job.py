# SPDX-License-Identifier: Apache-2.0
"""What is to be reduced for all, and what comes of it: what algorithms are told."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from replicator.primitives import reductions


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be reduced.

    Attributes:
        op: One of REDUCTIONS, with a meaning for the dtype.
        column: `column[n]` is the tensor of the n-th participant.
        devices: `devices[n]` is where that runs.
        group: `group[n]` is its replica's id.
        hub: Which participant does what is done once.
        name: Names the communication, alike for nothing else in the graph.
        whole: Where `column` are partial results, one per host: the steps of the whole
            reduction. None: it is this one.
    """

    op: str
    column: Sequence[tf.Tensor]
    devices: Sequence[str]
    group: Sequence[int]
    hub: int
    name: str = ""
    whole: reductions.Steps | None = None

    @property
    def count(self) -> int:
        """How many participants there are."""
        return len(self.column)

    @property
    def steps(self) -> reductions.Steps:
        """The reduction, as the steps that combine pairs."""
        if self.whole is not None:
            return self.whole
        return reductions.steps_of(self.op, self.column[0].dtype, self.count)
