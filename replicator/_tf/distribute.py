# SPDX-License-Identifier: Apache-2.0
"""What tf.distribute answers to libraries that query it during a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib as _distribute
from tensorflow.python.ops import summary_ops_v2 as _summaries


def default_strategy() -> Any:
    """Returns tf.distribute's default strategy, the one outside of all scopes.

    `tf.distribute.get_strategy()` returns that of an enclosing scope, if there is one.
    """
    return _distribute._get_default_strategy()


@contextlib.contextmanager
def distribution_mode(
    replica: Any = None,
    cross_replica: Any = None,
    strategy: Callable[[], Any] = default_strategy,
) -> Iterator[None]:
    """Sets what tf.distribute answers in this block; by default, no strategy.

    Entering a strategy's scope, or a ReplicaContext, would also change which variables
    are created and which summaries are written.

    Args:
        replica: What `get_replica_context()` returns.
        cross_replica: The strategy of a cross-replica context, in which
            `get_replica_context()` returns None. With neither: as outside of all
            scopes.
        strategy: Called on each `get_strategy()` for its result.
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


@contextlib.contextmanager
def summaries_if(condition: Callable[[], tf.Tensor]) -> Iterator[None]:
    """Makes summaries in this block be written only where a condition is true.

    Each summary asks for it. `tf.summary.record_if` is replaced by a record_if of the
    user's inside; this is the flag that tf.distribute has for its replicas.
    """
    state = _summaries._summary_state
    saved = state.is_recording_distribution_strategy
    state.is_recording_distribution_strategy = condition
    try:
        yield
    finally:
        state.is_recording_distribution_strategy = saved


class _Mode(_distribute._ThreadMode):
    """The attributes that tf.distribute reads; `strategy` is computed at each read."""

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
    """A replica context that is notified before a distributed variable picks its copy.

    Such variables ask for a private number, not for the public tensor.
    """

    def before_copy(self) -> None:
        """Does nothing; subclasses raise where the replica has no copy."""

    @property
    def _replica_id(self) -> Any:
        self.before_copy()
        return super()._replica_id


class CombinedContext(tf.distribute.ReplicaContext):
    """The context of optimizers with combined gradients: it sums over one replica.

    The default context does so too, but adds two ops per gradient.
    """

    def __init__(self) -> None:
        super().__init__(default_strategy(), 0)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Returns the value unchanged."""
        return value
