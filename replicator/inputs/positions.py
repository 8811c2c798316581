# SPDX-License-Identifier: Apache-2.0
"""Checkpoints the position of inputs."""

from __future__ import annotations

import base64
import contextlib
import json
import weakref
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.cluster.peers import Peers
from replicator.inputs import feeds, places

_FAIL = 2  # tf.data's own number: fail if state cannot be saved
_PICKY = (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError)


class Positions(tf.Module):
    """The positions of the inputs of a Replicator's steps: `Replicator.inputs`.

    A checkpoint holds the tf.data iterators in the order in which steps first used
    them, so a program that repeats its calls finds its own again. An iterator created
    after the checkpoint was restored starts at its saved position.

    Example:
        >>> def resumed(path=None):  # a program that is started again
        ...     repl = replicator.Replicator(["CPU:0", "CPU:1"])
        ...     step = repl.build(lambda x: x, tf.data.Dataset.range(8))
        ...     checkpoint = tf.train.Checkpoint(inputs=repl.inputs)
        ...     if path is not None:
        ...         _ = checkpoint.restore(path)
        ...     return [int(x) for x in step()], checkpoint.save("position")
        >>> elements, path = resumed()
        >>> elements, resumed(path)[0]
        ([0, 1], [2, 3])

    Args:
        peers: The processes that feed the other replicas, if any: each has its own
            iterators, and a checkpoint holds those of all.

    Raises:
        InputError: When a checkpoint is saved: a dataset has state that cannot be
            saved. When it is restored: it is of a different number of pipelines or
            hosts.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        super().__init__(name="inputs")
        self._count = 0
        self._peers = peers

    def _add(self, feed: feeds.Feed, user: Any) -> None:
        if not feed.iterators:
            return
        name = f"input_{self._count}"
        self._count += 1
        setattr(self, name, Position(feed, self._peers))
        weakref.finalize(user, self._forget, name)

    def _forget(self, name: str) -> None:
        delattr(self, name)


def add(inputs: Positions, feed: feeds.Feed, user: Any) -> None:
    """Adds the iterators of a step's feed to the positions that checkpoints hold.

    Args:
        inputs: The positions.
        feed: The feed.
        user: The object the feed serves; its iterators are forgotten with it.
    """
    inputs._add(feed, user)


class Position(tf.train.experimental.PythonState):
    """The position of a feed's iterators.

    A tf.data iterator can save itself as well, but not one on another host.

    Args:
        feed: The feed; only a weak reference is kept, since its parts refer to the
            step.
        peers: As for Positions.
    """

    def __init__(self, feed: feeds.Feed, peers: Peers | None = None) -> None:
        self._feed = weakref.ref(feed)
        self._peers = peers

    @property
    def _iterators(self) -> tuple[Any, ...]:
        feed = self._feed()
        return () if feed is None else tuple(feed.iterators)

    def serialize(self) -> bytes:
        """Returns the positions, for `deserialize`.

        Raises:
            InputError: A dataset has state that cannot be saved, or is prefetched to
                an accelerator.
        """
        states = []
        for iterator, home in self._iterators:
            _check_place(iterator, "saved")
            try:
                with places.at(home):
                    state = tf.raw_ops.SerializeIterator(
                        resource_handle=_resource(iterator), external_state_policy=_FAIL
                    )
                    states.append(tf.io.serialize_tensor(state))
            except _PICKY as error:
                raise errors.InputError(
                    f"the position of an input cannot be saved: "
                    f"{errors.summary(error)}.",
                    fix="leave repl.inputs out of the checkpoint, and let the dataset "
                    "skip what was already read: dataset.skip(...).",
                ) from error
        positions = bytes(tf.io.serialize_tensor(tf.stack(states)).numpy())
        if self._peers is None:
            return positions
        text = base64.b64encode(positions).decode()
        return json.dumps(self._peers.exchange("saves inputs", text)).encode()

    def deserialize(self, string_value: bytes) -> None:
        """Moves the iterators to saved positions.

        Args:
            string_value: The result of `serialize`.

        Raises:
            InputError: It is of a different number of pipelines or hosts, or a
                dataset is prefetched to an accelerator.
        """
        if self._peers is not None:
            string_value = self._own_part(string_value)
        states = tf.io.parse_tensor(string_value, tf.string)
        if len(states) != len(self._iterators):
            raise errors.InputError(
                f"a checkpoint holds the positions of {len(states)} pipelines, but "
                f"there are {len(self._iterators)}.",
                fix="run as many replicas as before; or deal one dataset to all of "
                'them, or split it with input_mode="global_batch", which can '
                "continue with any number.",
            )
        for state, (iterator, home) in zip(states, self._iterators, strict=True):
            _check_place(iterator, "restored")
            with places.at(home):
                tf.raw_ops.DeserializeIterator(
                    resource_handle=_resource(iterator),
                    serialized=tf.io.parse_tensor(state, tf.variant),
                )

    def _own_part(self, value: bytes) -> bytes:
        """Returns this process's part of the positions that all processes saved."""
        assert self._peers is not None
        parts, count = [], len(self._peers.processes)
        with contextlib.suppress(ValueError):  # a single process saved it
            parts = json.loads(value)
        if len(parts) != count:
            raise errors.InputError(
                f"a checkpoint holds the positions of inputs of {len(parts) or 1} "
                f"hosts, but the program runs on {count}.",
                fix="run it on as many hosts as before; or leave repl.inputs out of "
                "the checkpoint, and let the datasets skip what was already read.",
            )
        return base64.b64decode(parts[self._peers.process])


def _check_place(iterator: Any, action: str) -> None:
    """Checks that an iterator is on a host: TensorFlow saves and restores no others."""
    device = _resource(iterator).device
    if tf.DeviceSpec.from_string(device).device_type not in ("CPU", None):
        raise errors.InputError(
            f"the position of an input cannot be {action}: its elements are prefetched "
            f"to {device}.",
            fix='use input_mode="per_worker" or "global_batch", whose iterator is '
            "on the host; or leave repl.inputs out of the checkpoint, and let the "
            "dataset skip what was already read: dataset.skip(...).",
        )


def _resource(iterator: Any) -> Any:
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    return resource
