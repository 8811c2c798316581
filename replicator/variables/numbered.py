# SPDX-License-Identifier: Apache-2.0
"""Where checkpoints find what was made for one call, in any process."""

from __future__ import annotations

import hashlib

import tensorflow as tf


class Numbered(tf.Module):
    """Places for what was made for calls, by what these were given, and their order.

    Args:
        name: The module's.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self._numbers: dict[str, int] = {}

    def group(self, facts: str) -> tf.Module:
        """Returns a place for one call's; calls alike are told apart by their order.

        Args:
            facts: What the call was given, the same on any number of replicas.
        """
        digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
        number = self._numbers.get(digest, 0)
        self._numbers[digest] = number + 1
        group = tf.Module(name=f"g{digest}_{number}")
        setattr(self, group.name, group)
        return group
