# SPDX-License-Identifier: Apache-2.0
"""Ends a step's inputs in all processes at once.

In between-graph mode each process reads its own datasets. An exhausted one would raise
OutOfRangeError in its process alone, and the others would wait for that process in a
collective. So unless all are certain to end together, each step begins with a
collective that tells whether every process has its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.inputs import iterators


class AgreedEnd:
    """Passes elements on if all processes have theirs, and ends the step otherwise.

    Args:
        group_size: The number of processes.
        group_key: The group key of all processes.
        instance_key: The instance key of this collective.
    """

    def __init__(self, group_size: int, group_key: int, instance_key: int) -> None:
        self._keys = {
            "group_size": group_size,
            "group_key": group_key,
            "instance_key": instance_key,
        }
        with tf.init_scope(), tf.device("CPU:0"):
            self._over = iterators.make(tf.data.Dataset.range(0))
        self._last: tf.Operation | None = None

    def elements(self, pull: Sequence[Callable[[], Any]]) -> list[Any]:
        """Returns an element per replica, once every process has all of its own.

        Args:
            pull: One function per replica, which takes its next element as an Optional;
                called in order.
        """
        optionals: list[Any] = []
        flags: list[tf.Tensor] = []
        for take in pull:
            with tf.control_dependencies([flag.op for flag in flags[-1:]]):
                optionals.append(take())
            flags.append(optionals[-1].has_value())
        check = self._passed(tf.reduce_all(tf.stack(flags)))
        with tf.control_dependencies([check]):
            return [optional.get_value() for optional in optionals]

    def _passed(self, mine: tf.Tensor) -> tf.Operation:
        """Returns an op that raises OutOfRangeError unless all processes have inputs.

        Args:
            mine: Whether this process has its inputs.
        """
        follows = self._last is not None and self._last.graph is mine.graph
        with (
            tf.device("CPU:0"),
            # In sequence: only their order tells the collective's calls apart.
            tf.control_dependencies([self._last] if follows else []),
        ):
            flags = tf.raw_ops.CollectiveGatherV2(
                input=tf.cast(tf.reshape(mine, [1]), tf.int32),
                ordering_token=[],
                **self._keys,
            )
        result = tf.cond(
            tf.reduce_min(flags) > 0,
            lambda: tf.constant(0, tf.int64),
            self._over.get_next,  # raises OutOfRangeError, as an iterator does
        )
        self._last = result.op
        return result.op


def agree(peers: Peers, rounds: int | None) -> AgreedEnd | None:
    """Exchanges the number of steps that each process has inputs for.

    Args:
        peers: The processes; each is creating inputs.
        rounds: The number of steps that this process has inputs for; -1: infinite,
            None: unknown.

    Returns:
        None if all processes end together, or never.
    """
    answers = peers.exchange("makes inputs", [rounds, peers.keys.next])
    lengths = {length for length, _ in answers}
    if len(lengths) == 1 and None not in lengths:
        return None
    everyone = tuple(peers.everyone)
    group = peers.keys.group(everyone)
    instance = peers.keys.take(max(number for _, number in answers), 1)
    return AgreedEnd(len(everyone), group, instance)


def refuse_padding() -> None:
    """Rejects padding of rounds that several processes read elements of.

    Raises:
        InputError: Always.
    """
    raise errors.InputError(
        errors.compose(
            'remainder="pad" cannot fill the last round of inputs that each host '
            "creates by itself in between-graph mode: no host knows how many examples "
            "the others have.",
            [f"at {errors.user_line()}"],
            "pass a Dataset, or an input_fn without an InputContext, which is the same "
            "on every host.",
        )
    )
