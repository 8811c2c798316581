# SPDX-License-Identifier: Apache-2.0
"""Inputs that end in one process before another: the step ends in all of them.

In between-graph mode each process reads its own datasets. One that is over would raise
OutOfRangeError in its process alone, and the others would wait for that one in a
collective. So where it is not certain that all end together, each step begins by
telling one another whether everyone has its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.inputs import iterators


class AgreedEnd:
    """Lets elements pass if all processes have theirs, and else ends the step.

    Args:
        group_size: How many processes there are.
        group_key: That of all of them.
        instance_key: Tells what they say here from all else.
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
        """Returns an element of each replica, once every process has all of its own.

        Args:
            pull: Each takes the next element of a replica, as an Optional; called in
                their order.
        """
        optionals: list[Any] = []
        there: list[tf.Tensor] = []
        for take in pull:
            with tf.control_dependencies([flag.op for flag in there[-1:]]):
                optionals.append(take())
            there.append(optionals[-1].has_value())
        passed = self._passed(tf.reduce_all(tf.stack(there)))
        with tf.control_dependencies([passed]):
            return [optional.get_value() for optional in optionals]

    def _passed(self, mine: tf.Tensor) -> tf.Operation:
        """Returns an op that fails with OutOfRangeError unless all have their inputs.

        Args:
            mine: Whether this process has.
        """
        before = self._last is not None and self._last.graph is mine.graph
        with (
            tf.device("CPU:0"),
            # One after the other: what they say is told apart by its order alone.
            tf.control_dependencies([self._last] if before else []),
        ):
            told = tf.raw_ops.CollectiveGatherV2(
                input=tf.cast(tf.reshape(mine, [1]), tf.int32),
                ordering_token=[],
                **self._keys,
            )
        passed = tf.cond(
            tf.reduce_min(told) > 0,
            lambda: tf.constant(0, tf.int64),
            self._over.get_next,  # raises OutOfRangeError, as an iterator does
        )
        self._last = passed.op
        return passed.op


def agree(peers: Peers, rounds: int | None) -> AgreedEnd | None:
    """Has all processes say how many steps their inputs are for.

    Args:
        peers: The processes; each makes inputs.
        rounds: For how many steps this one has inputs; -1: without end, None: unknown.

    Returns:
        None if they all end together, or never.
    """
    said = peers.exchange("makes inputs", [rounds, peers.keys.next])
    lengths = {length for length, _ in said}
    if len(lengths) == 1 and None not in lengths:
        return None
    everyone = tuple(peers.everyone)
    group = peers.keys.group(everyone)
    instance = peers.keys.take(max(number for _, number in said), 1)
    return AgreedEnd(len(everyone), group, instance)


def refuse_padding() -> None:
    """Refuses to fill rounds of which several processes have elements.

    Raises:
        InputError: Always.
    """
    raise errors.InputError(
        errors.compose(
            'remainder="pad" fills the last round of inputs that each host makes by '
            "itself, which no host can in between-graph mode: how many examples the "
            "others have, it does not know.",
            [f"at {errors.user_line()}"],
            "pass a Dataset, or an input_fn without an InputContext, which is the same "
            "on every host.",
        )
    )
