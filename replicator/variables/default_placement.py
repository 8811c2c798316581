# SPDX-License-Identifier: Apache-2.0
"""Where variables are on which no strategy decides: the option `variables`.

Each value of the option has a rule in RULES, which is asked about every new variable.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import tensorflow as tf

from replicator.costs import cost, rehearsal
from replicator.variables.placement import Mirrored, Owned, Placement
from replicator.world import World

Owner = TypeVar("Owner", bound=Hashable)


class Loads(Generic[Owner]):
    """Assigns variables to owners, each to the one with the fewest bytes so far."""

    def __init__(self, owners: Iterable[Owner]) -> None:
        self._nbytes = dict.fromkeys(owners, 0)
        self._last: Owner | None = None

    def least(self, nbytes: int) -> Owner:
        """Adds to the least loaded owner, the first of several, and returns it.

        Args:
            nbytes: The bytes to add.
        """
        owner = self.lowest()
        self.add(owner, nbytes)
        return owner

    def lowest(self) -> Owner:
        """Returns the least loaded owner, the first of several."""
        return min(self._nbytes, key=self._nbytes.__getitem__)

    def add(self, owner: Owner, nbytes: int) -> None:
        """Adds to the load of an owner."""
        self._nbytes[owner] += nbytes
        self._last = owner

    def shard(self, rank: int | None, nbytes: int) -> Owner | None:
        """Assigns a variable to an owner; returns None if each replica gets its own.

        A vector goes to the owner of the variable before it: a bias to that of its
        layer's weights, whose gradient is computed from the same tensors. A scalar is
        not sharded: it would cost a transfer to save a few bytes.

        Args:
            rank: The number of the variable's axes, if known.
            nbytes: Its size.
        """
        if not rank:
            return None
        if rank == 1 and self._last is not None:
            self.add(self._last, nbytes)
            return self._last
        return self.least(nbytes)


class Everywhere:
    """Mirrors all variables; the base class of other rules.

    Args:
        world: The replicas.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.loads = Loads(world.local)

    def placement(self, value: Callable[[], tf.Tensor]) -> Placement:
        """Returns the placement of a variable.

        Args:
            value: Returns its initial value.
        """
        return Mirrored()


class Sharded(Everywhere):
    """Divides variables over the replicas, which own about the same number of bytes."""

    def placement(self, value: Callable[[], tf.Tensor]) -> Placement:
        """Returns that of an owner; integers, which may be counters, are mirrored."""
        own = value()
        owner = None
        if is_inexact(own):
            owner = self.loads.shard(own.shape.rank, nbytes_of(own))
        return Mirrored() if owner is None else Owned(owner)


def is_inexact(value: tf.Tensor) -> bool:
    """Whether a value is floating or complex."""
    return bool(value.dtype.is_floating or value.dtype.is_complex)


def nbytes_of(value: tf.Tensor) -> int:
    """Returns the size of a value in bytes; 0 if it is unknown."""
    return (value.shape.num_elements() or 0) * int(value.dtype.size)


RULES = {"mirrored": Everywhere, "sharded": Sharded}
VARIABLES = (*RULES, "auto")


def rule(variables: str, world: World) -> Everywhere:
    """Returns the rule for variables on which no strategy decides.

    For "auto", variables are sharded if all devices are CPUs of one process, where a
    read from another device costs no copy. Measured with 2 cores and 2 replicas, as a
    share of one device's time with the whole batch, mirrored and sharded: perceptrons
    of 32-64-64-10 units 0.79 and 0.75, of 1024-2048x3-10 units 1.38 and 1.17, of 100
    layers 1.18 and 0.94; so the answer holds for all sizes. On accelerators, which were
    not measured, each read of a variable would be a transfer.

    Args:
        variables: The user's option, one of VARIABLES.
        world: The replicas.
    """
    if variables == "auto":
        variables = "sharded" if cost.share_memory(world.devices) else "mirrored"
    are_several = world.num_replicas > 1 or rehearsal.is_on()
    return (RULES[variables] if are_several else Everywhere)(world)
