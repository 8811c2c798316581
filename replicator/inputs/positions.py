# SPDX-License-Identifier: Apache-2.0
"""The position of inputs, as checkpoints hold it."""

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

_FAIL = 2  # for datasets with a state that cannot be saved; tf.data's own number
_PICKY = (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError)


class Positions(tf.Module):
    """Where the inputs of all steps of a Replicator are: `Replicator.inputs`.

    What a checkpoint holds of it are the iterators of tf.data, in the order in which
    steps first used them; so a program that does what it did before finds its own. An
    iterator that is made after the checkpoint was restored begins where it was.

    Args:
        peers: The processes that feed the other replicas, if there are any: each has
            iterators of its own, and a checkpoint holds those of all.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        super().__init__(name="inputs")
        self._count = 0
        self._peers = peers

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
        setattr(self, name, Position(feed, self._peers))
        weakref.finalize(user, self._forget, name)

    def _forget(self, name: str) -> None:
        delattr(self, name)


class Position(tf.train.experimental.PythonState):
    """Where the iterators of a feed are.

    An iterator of tf.data saves itself as well, but not one on another host.

    Args:
        feed: The feed, which is not kept: what it is made of knows the step.
        peers: As of Positions.
    """

    def __init__(self, feed: feeds.Feed, peers: Peers | None = None) -> None:
        self._feed = weakref.ref(feed)
        self._peers = peers

    @property
    def _iterators(self) -> tuple[Any, ...]:
        feed = self._feed()
        return () if feed is None else tuple(feed.iterators)

    def serialize(self) -> bytes:
        """Returns what `deserialize` needs.

        Raises:
            InputError: A dataset has a state that cannot be saved.
        """
        states = []
        for iterator, home in self._iterators:
            try:
                with places.at(home):
                    state = tf.raw_ops.SerializeIterator(
                        resource_handle=_resource(iterator), external_state_policy=_FAIL
                    )
                    states.append(tf.io.serialize_tensor(state))
            except _PICKY as error:
                raise errors.InputError(
                    errors.compose(
                        "the position of an input cannot be saved: "
                        f"{errors.told(error)}.",
                        fix="leave repl.inputs out of the checkpoint, and have the "
                        "dataset begin behind what was read: dataset.skip(...).",
                    )
                ) from error
        own = bytes(tf.io.serialize_tensor(tf.stack(states)).numpy())
        if self._peers is None:
            return own
        text = base64.b64encode(own).decode()
        return json.dumps(self._peers.exchange("saves inputs", text)).encode()

    def deserialize(self, string_value: bytes) -> None:
        """Has the iterators go on from where they were.

        Args:
            string_value: What `serialize` returned.

        Raises:
            InputError: Others were there then.
        """
        if self._peers is not None:
            string_value = self._own_part(string_value)
        states = tf.io.parse_tensor(string_value, tf.string)
        if len(states) != len(self._iterators):
            raise errors.InputError(
                errors.compose(
                    f"a checkpoint holds the positions of {len(states)} pipelines, and "
                    f"there are {len(self._iterators)}.",
                    fix="run as many replicas as before; or deal one dataset to all of "
                    'them, or split it by input_mode="global_batch", which goes on '
                    "with any number.",
                )
            )
        for state, (iterator, home) in zip(states, self._iterators, strict=True):
            with places.at(home):
                tf.raw_ops.DeserializeIterator(
                    resource_handle=_resource(iterator),
                    serialized=tf.io.parse_tensor(state, tf.variant),
                )

    def _own_part(self, value: bytes) -> bytes:
        """Returns what this process told when all of them saved their inputs."""
        assert self._peers is not None
        parts, count = [], len(self._peers.everyone)
        with contextlib.suppress(ValueError):  # one process saved it
            parts = json.loads(value)
        if len(parts) != count:
            raise errors.InputError(
                errors.compose(
                    f"a checkpoint holds the positions of inputs of "
                    f"{len(parts) or 1} hosts, and the program runs on {count}.",
                    fix="run it on as many hosts; or leave repl.inputs out of the "
                    "checkpoint, and have the datasets begin behind what was read.",
                )
            )
        return base64.b64decode(parts[self._peers.own])


def _resource(iterator: Any) -> Any:
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    return resource
