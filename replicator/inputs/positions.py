"""The position of inputs, as checkpoints hold it."""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from replicator.inputs import feeds


class Positions(tf.Module):
    """Where the inputs of all steps of a Replicator are: `Replicator.inputs`.

    What a checkpoint holds of it are the iterators of tf.data, in the order in which
    steps first used them; so a program that does what it did before finds its own. An
    iterator that is made after the checkpoint was restored begins where it was.
    """

    def __init__(self) -> None:
        super().__init__(name="inputs")
        self._count = 0

    def add(self, feed: feeds.Feed, user: Any) -> None:
        """Takes note of what feeds a step.

        Args:
            feed: The inputs.
            user: What they are there for; once it is gone, they are forgotten.
        """
        if not feed.iterators:
            return
        name = f"input_{self._count}"
        self._count += 1
        setattr(self, name, list(feed.iterators))
        weakref.finalize(user, self._forget, name)

    def _forget(self, name: str) -> None:
        delattr(self, name)
