# SPDX-License-Identifier: Apache-2.0
"""ReduceTask: one reduction for all participants, the argument of an algorithm."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from replicator.primitives import reductions


@dataclasses.dataclass(frozen=True)
class ReduceTask:
    """One reduction for all participants.

    Attributes:
        op: One of REDUCTIONS, defined for the dtype.
        column: `column[n]` is the tensor of the n-th participant.
        devices: `devices[n]` is its device.
        group: `group[n]` is its replica's id.
        hub: The participant that does what needs to be done only once.
        name: Unique per communication; used as NCCL's shared_name.
        whole_steps: If `column` holds partial results, one per host: the steps of the
            whole reduction. None: this is the whole reduction.
    """

    op: str
    column: Sequence[tf.Tensor]
    devices: Sequence[str]
    group: Sequence[int]
    hub: int
    name: str = ""
    whole_steps: reductions.Steps | None = None

    @property
    def count(self) -> int:
        """The number of participants."""
        return len(self.column)

    @property
    def steps(self) -> reductions.Steps:
        """The steps of the reduction, which combine pair by pair."""
        if self.whole_steps is not None:
            return self.whole_steps
        return reductions.steps_of(self.op, self.column[0].dtype, self.count)
