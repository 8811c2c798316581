# SPDX-License-Identifier: Apache-2.0
"""Creates the plain variables inside a replicated one, first and at each move."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from replicator import errors
from replicator._tf import ops, variables
from replicator.cluster.peers import Peers
from replicator.variables import elsewhere
from replicator.variables.placement import Owned, Placement, Seeded, Write
from replicator.variables.seeds import Seed
from replicator.world import World


class Store(Protocol):
    """Holds the variables that several programs share."""

    def takes(self, placement: Placement, local: tf.Variable) -> bool:
        """Whether a variable with this placement is to be shared."""

    def share(self, local: tf.Variable) -> tf.Variable:
        """Returns the shared variable that replaces a local one."""


class Components:
    """Creates the components of variables on the devices that a placement names.

    Args:
        world: The replicas.
        peers: The processes that create the other replicas' components, if any do.
        store: The variables that programs share in asynchronous mode.
    """

    def __init__(self, world: World, peers: Peers | None, store: Store | None) -> None:
        self._world = world
        self._peers = peers
        self._store = store

    def new(
        self, kwargs: dict[str, Any], placement: Placement
    ) -> tuple[list[tf.Variable], Placement]:
        """Creates one plain variable per device, or one in place of all.

        Each starts with its share of the first one's initial value.

        Args:
            kwargs: The arguments of TensorFlow's variable creator.
            placement: Where to create the components.

        Returns:
            The components, and their placement: another one for seeds and if shared.
        """
        names = ("initial_value", "name", "dtype", "shape", "validate_shape")
        facts = {k: kwargs[k] for k in names if k in kwargs}
        with tf.device(placement.device(self._world)):
            first = variables.ResourceVariable(trainable=False, collections=[], **facts)
        if self._peers is not None:
            elsewhere.adopt(self._peers, first)
        if self._store is not None and self._store.takes(placement, first):
            first = self._store.share(first)
            placement = Owned(self._world.local[0], first.device, shared=True)
        seed = Seed.of(first) if placement.owner is None else None
        if seed is not None:
            placement = Seeded(seed)
        del facts["initial_value"]

        def initial_value(r: int) -> Any:
            eager = tf.executing_eagerly()
            value = first.read_value() if eager else first.initial_value
            return placement.written(value, Write(first, r))

        def on(r: int) -> tf.Variable:
            device = self._world.device(r)
            if device == placement.device(self._world):
                return first
            value = functools.partial(initial_value, r)
            return _component(first, value, f"replica_{r}", device, **facts)

        components = placement.components(first, on, self._world)
        if self._peers is not None and placement.differs:
            value = first.read_value()  # adopted, so it is replica 0's so far
            first.assign(placement.written(value, Write(first, self._world.local[0])))
        return components, placement

    def moved(
        self, variable: Any, placement: Placement
    ) -> tuple[list[tf.Variable], tf.Variable]:
        """Creates a variable's components for a new placement.

        They start with its current value, or in a tf.Graph with its initial value.
        Components that are already in the right place are reused.

        Args:
            variable: A ReplicatedVariable whose components are equal.
            placement: The new placement.

        Returns:
            The components, and which of them is the first.

        Raises:
            UnsupportedError: Other programs use the variable where it is.
        """
        if self._store is not None:
            raise errors.UnsupportedError(
                f"variable {variable.name}, which several programs share, is needed on "
                "each replica: by a function with jit_compile=True, or by an op that "
                "writes several variables.",
                fix="use neither in asynchronous mode.",
            )
        world, old = self._world, variable.storage.first
        by_device: dict[str, tf.Variable] = {}
        if variable.placement.owner is None or variable.placement.has_copies:
            by_device = dict(zip(world.devices, variable.components, strict=False))
        old_device = _device_of(variable)
        by_device[old_device] = old
        eager = tf.executing_eagerly()
        value = old.read_value() if eager else old.initial_value
        new_components: list[tf.Variable] = []

        def on(device: str, name: str) -> tf.Variable:
            if device not in by_device:
                by_device[device] = _component(
                    old, lambda: value, name, device, shape=old.shape
                )
                new_components.append(by_device[device])
            return by_device[device]

        stays = placement.owner is None and old_device in world.devices
        first = on(old_device if stays else placement.device(world), "moved")
        components = placement.components(
            first, lambda r: on(world.device(r), f"replica_{r}"), world
        )
        if new_components and not eager:  # other code may already hold the initializer
            variable.storage.late = True
            initializers = [component.initializer for component in new_components]
            ops.add_control_inputs(variable.initializer, initializers)
        return components, first


def _device_of(variable: Any) -> str:
    """Returns the device of a variable's first component."""
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
    """Creates another component of a variable."""
    name = first.name.partition(":")[0].split("/")[-1]
    own.update(name=f"{name}/{suffix}", dtype=first.dtype)
    with tf.device(device):
        return variables.ResourceVariable(
            lambda: tf.identity(initial_value()),
            trainable=False,
            collections=[],
            **own,
        )
