# SPDX-License-Identifier: Apache-2.0
"""Compressors of all_reduce that remember in checkpoints: Kept.

A compressor that is passed to all_reduce as it is remembers by the place of the call,
in variables of the step, which are in no checkpoint.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.compressors import specs
from replicator.compressors.base import Compressor
from replicator.compressors.memory import Memory, Place


class Kept(tf.Module):
    """A compressor for all_reduce, with what it remembers, for checkpoints.

    Each call in a step remembers by itself: the n-th that is given it, in each step.

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
        ArgumentError: There is no such compressor.
    """

    def __init__(self, compressor: Any) -> None:
        super().__init__(name="kept")
        made = specs.compressor("Kept", compressor)
        if made is None:
            raise errors.ArgumentError(
                errors.compose(
                    f"Kept was given compressor={errors.shown(compressor)}, which "
                    "has nothing to keep.",
                    fix='name a compressor: Kept("ef(topk(ratio=0.01))").',
                )
            )
        self.compressor: Compressor = made
        self._memory = Memory()
        self._places: dict[Any, Place] = {}

    def place(self) -> Place:
        """Returns where the call at hand remembers, in the step of one replica."""
        replica = context.require("all_reduce")
        number = replica.count(("kept", id(self)))
        graph = replica.build.graph
        key = number, None if graph.building_function else graph
        if key not in self._places:
            group = self._memory.group(f"call {number}")
            self._places[key] = Place(group, "all_reduce", replica.creating_for_all)
        return self._places[key]
