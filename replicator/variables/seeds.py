# SPDX-License-Identifier: Apache-2.0
"""Finds the seeds of random generators and offsets them on each replica.

A generator's state is a variable. Its components hold the same state except for the
seed, which is offset by the replica, so that every replica draws different numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from replicator.graph.passes.random import OFFSET


@dataclasses.dataclass(frozen=True)
class Seed:
    """Describes where the state of a random generator holds its seed.

    Attributes:
        position: The position of the seed in the state, an integer vector.
        resets: Whether assigning a state in a step sets a new seed, which has to be
            offset, or advances the replica's own.
    """

    position: int
    resets: bool

    @classmethod
    def of(cls, component: tf.Variable) -> Seed | None:
        """Returns the seed's description if `component` is a generator's state."""
        if not component.dtype.is_integer or component.shape.rank != 1:
            return None
        return _SEEDS.get(component.name.partition(":")[0].split("/")[-1])

    def offset(self, like: tf.Variable, replica_id: Any) -> tf.Tensor:
        """Returns what to add to the state on a replica, in the variable's shape."""
        offset = [0] * like.shape.num_elements()
        offset[self.position] = OFFSET
        return tf.constant(offset, like.dtype) * tf.cast(replica_id, like.dtype)


# Keyed by the names of the states of Keras' SeedGenerator and tf.random.Generator.
_SEEDS = {
    "seed_generator_state": Seed(position=0, resets=False),
    "StateVar": Seed(position=-1, resets=True),
}
