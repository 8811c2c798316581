# SPDX-License-Identifier: Apache-2.0
"""The plain variables that a replicated one is made of: made, and made elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from replicator import _tf, errors
from replicator.cluster.peers import Peers
from replicator.variables import elsewhere
from replicator.variables.placement import Owned, Placement, Seeded, Write
from replicator.variables.seeds import Seed
from replicator.world import World


class Store(Protocol):
    """Has variables that several programs share."""

    def takes(self, placement: Placement, local: tf.Variable) -> bool:
        """Whether a variable is shared that would have a placement here."""

    def share(self, local: tf.Variable) -> tf.Variable:
        """Returns the variable that is in the place of a local one."""


class Components:
    """Makes the components of variables, on the devices that a placement says.

    Args:
        world: The replicas.
        peers: The processes that make the other replicas' components, if any do.
        store: What this program shares with others, in asynchronous mode.
    """

    def __init__(self, world: World, peers: Peers | None, store: Store | None) -> None:
        self._world = world
        self._peers = peers
        self._store = store

    def new(
        self, kwargs: dict[str, Any], placement: Placement
    ) -> tuple[list[tf.Variable], Placement]:
        """Creates one plain variable per device, or one in place of all.

        They begin with what each gets of the first one's initial value.

        Args:
            kwargs: What TensorFlow's creator was given.
            placement: Where they are.

        Returns:
            The components, and their placement: that of a seed is found out here.
        """
        names = ("initial_value", "name", "dtype", "shape", "validate_shape")
        own = {k: kwargs[k] for k in names if k in kwargs}
        with tf.device(placement.device(self._world)):
            first = _tf.ResourceVariable(trainable=False, collections=[], **own)
        if self._peers is not None:
            elsewhere.adopt(self._peers, first)
        if self._store is not None and self._store.takes(placement, first):
            first = self._store.share(first)
            placement = Owned(self._world.local[0], first.device, shared=True)
        seed = Seed.of(first) if placement.owner is None else None
        if seed is not None:
            placement = Seeded(seed)
        del own["initial_value"]

        def initial_value(r: int) -> Any:
            eager = tf.executing_eagerly()
            value = first.read_value() if eager else first.initial_value
            return placement.written(value, Write(first, r))

        def on(r: int) -> tf.Variable:
            device = self._world.device(r)
            if device == placement.device(self._world):
                return first
            value = functools.partial(initial_value, r)
            return _component(first, value, f"replica_{r}", device, **own)

        components = placement.components(first, on, self._world)
        if self._peers is not None and placement.differs:
            value = first.read_value()  # which would be that of replica 0
            first.assign(placement.written(value, Write(first, self._world.local[0])))
        return components, placement

    def moved(
        self, variable: Any, placement: Placement
    ) -> tuple[list[tf.Variable], tf.Variable]:
        """Creates the components of a variable that is to be elsewhere.

        They begin with what it holds now, or in a tf.Graph will hold at first. Those
        that are where one has to be are kept.

        Args:
            variable: A ReplicatedVariable of equal components.
            placement: Where it will be.

        Returns:
            The components, and which of them is the first.

        Raises:
            UnsupportedError: Other programs use it where it is.
        """
        if self._store is not None:
            raise errors.UnsupportedError(
                errors.compose(
                    f"variable {variable.name}, which several programs share, is "
                    "needed on each replica: by a function with jit_compile=True, or "
                    "by an op that writes several variables.",
                    [f"at {errors.user_line()}"],
                    "in asynchronous mode, do without.",
                )
            )
        world, old = self._world, variable.storage.first
        known: dict[str, tf.Variable] = {}
        if variable.placement.owner is None or variable.placement.has_copies:
            known = dict(zip(world.devices, variable.components, strict=False))
        before = _device_of(variable)
        known[before] = old
        eager = tf.executing_eagerly()
        value = old.read_value() if eager else old.initial_value
        made: list[tf.Variable] = []

        def on(device: str, name: str) -> tf.Variable:
            if device not in known:
                known[device] = _component(
                    old, lambda: value, name, device, shape=old.shape
                )
                made.append(known[device])
            return known[device]

        stays = placement.owner is None and before in world.devices
        first = on(before if stays else placement.device(world), "moved")
        components = placement.components(
            first, lambda r: on(world.device(r), f"replica_{r}"), world
        )
        if made and not eager:  # what initializes it may be known elsewhere by now
            added = [one.initializer for one in made]
            _tf.add_control_inputs(variable.initializer, added)
        return components, first


def _device_of(variable: Any) -> str:
    """Returns where the first component of a variable is."""
    placement, world = variable.placement, variable.world
    for device, component in zip(world.devices, variable.components, strict=False):
        if placement.owner is None and component is variable.storage.first:
            return str(device)
    return str(placement.device(world))


def _component(
    first: tf.Variable,
    initial_value: Callable[[], Any],
    suffix: str,
    device: str,
    **own: Any,
) -> tf.Variable:
    """Creates a component of a variable that has one already."""
    name = first.name.partition(":")[0].split("/")[-1]
    own.update(name=f"{name}/{suffix}", dtype=first.dtype)
    with tf.device(device):
        return _tf.ResourceVariable(
            lambda: tf.identity(initial_value()),
            trainable=False,
            collections=[],
            **own,
        )
