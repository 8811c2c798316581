# SPDX-License-Identifier: Apache-2.0
"""Kept: a compressor for all_reduce whose state is saved in checkpoints.

A compressor passed to all_reduce directly keeps its state per call, in variables of the
step, which are in no checkpoint.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.compressors import specs
from replicator.compressors.base import Compressor
from replicator.compressors.memory import Memory, StateStore


class Kept(tf.Module):
    """A compressor for all_reduce, with its state, for checkpoints.

    The state is kept per call: the n-th call that uses it, in each step.

    Example:
        >>> from replicator import compressors
        >>> kept = compressors.Kept("ef(topk(ratio=0.5))")
        >>> def step_fn():
        ...     return repl.all_reduce(tf.constant([3.0, 2.0]), compressor=kept)
        >>> print(repl.run(step_fn)[0].numpy(), repl.run(step_fn)[0].numpy())
        [6. 0.] [0. 8.]
        >>> path = tf.train.Checkpoint(kept=kept).write("kept")

    Args:
        compressor: A Compressor, or its text.

    Attributes:
        compressor: The Compressor.

    Raises:
        ArgumentError: `compressor` is not a compressor.
    """

    def __init__(self, compressor: Any) -> None:
        super().__init__(name="kept")
        parsed = specs.compressor("Kept", compressor)
        if parsed is None:
            raise errors.ArgumentError(
                f"Kept was given compressor={errors.repr_of(compressor)}, which has "
                "nothing to keep.",
                fix='name a compressor: Kept("ef(topk(ratio=0.01))").',
            )
        self.compressor: Compressor = parsed
        self._memory = Memory()
        self._places: dict[Any, StateStore] = {}

    def _place(self) -> StateStore:
        replica = context.require("all_reduce")
        number = replica.count(("kept", id(self)))
        graph = replica.build.graph
        key = number, None if graph.building_function else graph
        if key not in self._places:
            group = self._memory.group(f"call {number}")
            self._places[key] = StateStore(
                group, "all_reduce", replica.creating_for_all
            )
        return self._places[key]


def place_of(kept: Kept) -> StateStore:
    """Returns the store for the state of the current call, in one replica's step."""
    return kept._place()
