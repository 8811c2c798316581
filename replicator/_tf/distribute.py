# SPDX-License-Identifier: Apache-2.0
"""What tf.distribute answers to libraries that ask it during a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib as _distribute


def default_strategy() -> Any:
    """Returns the strategy of code that runs under none.

    `tf.distribute.get_strategy()` returns that of the scope around, if there is one.
    """
    return _distribute._get_default_strategy()


@contextlib.contextmanager
def distribution_mode(
    replica: Any = None,
    cross_replica: Any = None,
    strategy: Callable[[], Any] = default_strategy,
) -> Iterator[None]:
    """In this block, tf.distribute answers as told, by default under no strategy.

    Entering a strategy's scope, or a ReplicaContext, also changes what variables are
    created, and what summaries are written.

    Args:
        replica: What `get_replica_context()` returns.
        cross_replica: The strategy of a cross-replica context, where it returns None.
            With neither: as outside of all scopes.
        strategy: Called for what `get_strategy()` returns, each time.
    """
    if replica is None and cross_replica is None:
        mode = _distribute._get_default_replica_mode()
    else:
        mode = _Mode(strategy, cross_replica, replica)
    stack = tf.compat.v1.get_default_graph()._distribution_strategy_stack
    stack.append(mode)
    try:
        yield
    finally:
        stack.pop()


class _Mode(_distribute._ThreadMode):
    """What tf.distribute looks at: attributes, of which one is asked for each time."""

    def __init__(
        self, strategy: Callable[[], Any], cross_replica: Any, replica: Any
    ) -> None:
        self._strategy = strategy
        self.cross_replica_context = cross_replica
        self.replica_context = replica

    @property
    def strategy(self) -> Any:
        return self._strategy()


class WatchedContext(tf.distribute.ReplicaContext):
    """Is told before a variable of several copies looks up that of its replica.

    Such variables ask for a private number, not for the public tensor.
    """

    def before_copy(self) -> None:
        """Does nothing; raises, in what derives from this, where there is no copy."""

    @property
    def _replica_id(self) -> Any:
        self.before_copy()
        return super()._replica_id


class CombinedContext(tf.distribute.ReplicaContext):
    """For optimizers whose gradients are combined already: sums them over one replica.

    The one that answers outside of all strategies does so too, by two ops for each.
    """

    def __init__(self) -> None:
        super().__init__(default_strategy(), 0)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the value."""
        return value
