# SPDX-License-Identifier: Apache-2.0
"""Numbers calls, so that checkpoints find what was created for each in any process."""

from __future__ import annotations

import hashlib

import tensorflow as tf


class Numbered(tf.Module):
    """Holds what was created for calls, by what the calls were given and their order.

    Args:
        name: The name of the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self._numbers: dict[str, int] = {}

    def group(self, facts: str) -> tf.Module:
        """Returns a module for one call; equal calls are told apart by their order.

        Args:
            facts: What the call was given, equal on any number of replicas.
        """
        digest = hashlib.sha256(facts.encode()).hexdigest()[:8]
        number = self._numbers.get(digest, 0)
        self._numbers[digest] = number + 1
        group = tf.Module(name=f"g{digest}_{number}")
        setattr(self, group.name, group)
        return group

    def forget(self, group: tf.Module) -> None:
        """Removes the module of a call that never took place.

        Args:
            group: The module, the latest for what its call was given.
        """
        digest, number = group.name.removeprefix("g").rsplit("_", 1)
        delattr(self, group.name)
        if self._numbers[digest] == int(number) + 1:
            self._numbers[digest] = int(number)
