# SPDX-License-Identifier: Apache-2.0
"""Ends a step's inputs in all processes at once.

In between-graph mode each process reads its own datasets. An exhausted one would raise
OutOfRangeError in its process alone, and the others would wait for that process in a
collective. So unless all are certain to end together, each step begins with a
collective that tells whether every process has its elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.inputs import iterators

_SAMPLE = 256  # elements of each tensor that are compared
_DIFFERENT = (
    "Fix: let the input_fn take an InputContext, and create a shard for each replica; "
    "or read the same on every host: no random numbers or sets in Python code, and "
    "deterministic=True in map and interleave."
)


class ComparedElements(NamedTuple):
    """Elements that all processes read, of which each uses a part.

    Attributes:
        process: The number of this process.
        line: The user's line, for messages.
        always: Whether they are compared even where all processes end together.
    """

    process: int
    line: str
    always: bool


class AgreedEnd:
    """Passes elements on if all processes have theirs, and ends the step otherwise.

    Where all processes read the same elements, it also compares a sample of them.

    Args:
        group_size: The number of processes.
        group_key: The group key of all processes.
        instance_key: The instance key of this collective.
        compared: The elements, if all processes read the same.
    """

    def __init__(
        self,
        group_size: int,
        group_key: int,
        instance_key: int,
        compared: ComparedElements | None = None,
    ) -> None:
        self._compared = compared
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
        has_elements = tf.reduce_all(tf.stack(flags))
        facts = [tf.cast(has_elements, tf.int32)]
        if self._compared is not None:
            with tf.device("CPU:0"):
                sample = tf.cond(
                    has_elements,
                    lambda: _digest([optional.get_value() for optional in optionals]),
                    lambda: tf.zeros([2], tf.int32),
                )
                facts += [tf.constant(self._compared.process), *tf.unstack(sample)]
        check = self._check(tf.stack(facts))
        with tf.control_dependencies([check]):
            return [optional.get_value() for optional in optionals]

    def _check(self, status: tf.Tensor) -> tf.Operation:
        """Returns an op that raises OutOfRangeError unless all processes have inputs.

        Args:
            status: Whether this process has its inputs; if elements are compared, also
                its number and the digest of its elements.
        """
        follows = self._last is not None and self._last.graph is status.graph
        with (
            tf.device("CPU:0"),
            # In sequence: only their order tells the collective's calls apart.
            tf.control_dependencies([self._last] if follows else []),
        ):
            gathered = tf.raw_ops.CollectiveGatherV2(
                input=status, ordering_token=[], **self._keys
            )
            facts = tf.reshape(gathered, [self._keys["group_size"], -1])
        result = tf.cond(
            tf.reduce_min(facts[:, 0]) > 0,
            lambda: tf.constant(0, tf.int64),
            self._over.get_next,  # raises OutOfRangeError, as an iterator does
        )
        self._last = result.op
        if self._compared is None:
            return result.op
        with tf.device("CPU:0"), tf.control_dependencies([result.op]):
            are_equal = tf.reduce_all(facts[:, 2:] == facts[:1, 2:])
            return tf.cond(are_equal, tf.no_op, lambda: self._fail(facts)).op

    def _fail(self, facts: tf.Tensor) -> tf.Operation:
        """Returns an op that fails, and says what each process has read."""
        assert self._compared is not None, "elements are compared"
        facts = tf.gather(facts, tf.argsort(facts[:, 1]))
        texts = tf.strings.as_string(facts)
        digests = [
            tf.strings.join(["host ", texts[k, 1], " read ", texts[k, 2], texts[k, 3]])
            for k in range(self._keys["group_size"])
        ]
        problem = (
            "the hosts read different elements of what is to be one dataset, at "
            f"{self._compared.line}; digests of their elements follow:"
        )
        return tf.debugging.Assert(False, [problem, *digests, _DIFFERENT])


def _digest(elements: Any) -> tf.Tensor:
    """Returns two numbers that depend on a sample of the elements' values."""
    total = tf.constant(0, tf.int64)
    for leaf in tf.nest.flatten(elements, expand_composites=True):
        if leaf.dtype in (tf.variant, tf.resource):
            continue
        flat = tf.reshape(leaf, [-1])
        size = tf.size(flat)
        sample = flat[:: tf.maximum(1, size // _SAMPLE)]
        if leaf.dtype == tf.string:
            sample = tf.strings.reduce_join(sample, separator="\0")
        prints = tf.raw_ops.Fingerprint(
            data=tf.reshape(sample, [1, -1]), method="farmhash64"
        )
        number = tf.bitcast(prints[0], tf.int64) + tf.cast(size, tf.int64)
        total = total * 31 + number
    return tf.bitcast(total, tf.int32)


def agree(
    peers: Peers, rounds: int | None, compared: ComparedElements | None = None
) -> AgreedEnd | None:
    """Exchanges the number of steps that each process has inputs for.

    Args:
        peers: The processes; each is creating inputs.
        rounds: The number of steps that this process has inputs for; -1: infinite,
            None: unknown.
        compared: The elements, if all processes read the same.

    Returns:
        None if all processes end together, or never, and no elements are compared.
    """
    always = compared is not None and compared.always
    answers = peers.exchange("makes inputs", [rounds, peers.keys.next, always])
    lengths = {length for length, *_ in answers}
    if len(lengths) == 1 and None not in lengths and not any(a[2] for a in answers):
        return None
    processes = tuple(peers.processes)
    group = peers.keys.group(processes)
    instance = peers.keys.take(max(number for _, number, _ in answers), 1)
    return AgreedEnd(len(processes), group, instance, compared)


def refuse_padding() -> None:
    """Rejects padding of rounds that several processes read elements of.

    Raises:
        InputError: Always.
    """
    raise errors.InputError(
        'remainder="pad" cannot fill the last round of inputs that each host '
        "creates by itself in between-graph mode: no host knows how many examples "
        "the others have.",
        fix="pass a Dataset, or an input_fn without an InputContext, which is the same "
        "on every host.",
    )
