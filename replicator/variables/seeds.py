# SPDX-License-Identifier: Apache-2.0
"""Where random generators keep their seeds, and what keeps the replicas' apart.

A generator's state is a variable. Its components hold the same state but for the seed,
which is offset by the replica, so that every replica draws different numbers.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from replicator.graph.passes.random import OFFSET


@dataclasses.dataclass(frozen=True)
class Seed:
    """How the state of a random generator holds its seed.

    Attributes:
        position: Where the seed is in the state, an integer vector.
        resets: Whether a step that assigns a state sets a new seed, which has to be
            offset, rather than goes on from the replica's own.
    """

    position: int
    resets: bool

    @classmethod
    def of(cls, component: tf.Variable) -> Seed | None:
        """Returns where the seed is, if the variable is a generator's state."""
        if not component.dtype.is_integer or component.shape.rank != 1:
            return None
        return _SEEDS.get(component.name.partition(":")[0].split("/")[-1])

    def offset(self, like: tf.Variable, replica_id: int) -> tf.Tensor:
        """Returns what to add to the state on a replica, shaped as the variable."""
        offset = [0] * like.shape.num_elements()
        offset[self.position] = replica_id * OFFSET
        return tf.constant(offset, like.dtype)


# By the names that Keras' SeedGenerator and tf.random.Generator give their variables.
_SEEDS = {
    "seed_generator_state": Seed(position=0, resets=False),
    "StateVar": Seed(position=-1, resets=True),
}
