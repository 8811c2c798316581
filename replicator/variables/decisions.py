# SPDX-License-Identifier: Apache-2.0
"""Where a variable will be that is about to be created, and how it is kept equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from replicator.costs import rehearsal
from replicator.variables import division, initial_values
from replicator.variables.chooser import Chooser, Chosen, VariableFacts
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.placement import Aggregated, Mirrored, Owned, Placement
from replicator.variables.replicated import ReplicatedVariable
from replicator.world import World


class Decisions:
    """Decides on new variables: by a strategy, else by their kind and their size.

    Args:
        world: The replicas.
        sharded: Whether what no strategy decides on gets one owner.
        strategy: What is asked for variables that are trained; None: nobody.
    """

    def __init__(self, world: World, sharded: bool, strategy: Chooser | None) -> None:
        self._world = world
        self._sharded = sharded and (world.num_replicas > 1 or rehearsal.is_on())
        self._strategy = strategy
        self._bytes = dict.fromkeys(world.local, 0)  # that each replica owns
        self._last_owner: int | None = None

    def on(
        self, kwargs: dict[str, Any], primary: Any, path: str, order: Iterator[int]
    ) -> Chosen:
        """Returns what is decided on a variable.

        Args:
            kwargs: What it is created with; an initial value is made once.
            primary: The variable of which it is an optimizer's slot, if it is.
            path: Its path.
            order: Counts the variables that a strategy is asked for.
        """
        if kwargs.get("synchronization") == tf.VariableSynchronization.ON_READ:
            aggregation = kwargs.get("aggregation", tf.VariableAggregation.NONE)
            return Chosen(Aggregated(aggregation))
        if isinstance(primary, PartitionedVariable):
            shape = initial_values.dtype_and_shape(kwargs)[1]
            divided = division.of_slot(primary, shape)
            if divided is not None:
                return divided
        if isinstance(primary, ReplicatedVariable):
            return Chosen(self._of_slot(kwargs, primary))
        later = divides = False
        sizes: tuple[int, ...] = ()
        if self._strategy is not None and self.has_path(kwargs):
            # What is in parts is not to be drawn whole.
            dtype, shape = initial_values.dtype_and_shape(kwargs)
            if dtype.is_floating and shape.is_fully_defined():
                sizes = tuple(shape.as_list())
                nbytes = shape.num_elements() * dtype.size
                facts = VariableFacts(
                    path, sizes, dtype.name, order=next(order), nbytes=nbytes
                )
                chosen = self._strategy.choose(facts)
                if chosen is not None and not chosen.later:
                    return chosen
                later = chosen is not None
                divides = chosen is not None and chosen.may_divide and bool(shape.rank)
        owner = self._owner(_initial_value(kwargs)) if self._sharded else None
        placement = Mirrored() if owner is None else Owned(owner)
        made = Chosen(placement, later=later)
        return division.undecided(made, sizes[0]) if divides else made

    def has_path(self, kwargs: dict[str, Any]) -> bool:
        """Whether a strategy may be asked for a variable, by its path."""
        return bool(kwargs.get("trainable", True))

    def _owner(self, value: tf.Tensor) -> int | None:
        """Returns the replica that shall own a variable; None if each gets its own.

        Replicas own about the same number of bytes. What is a vector is owned with the
        variable before it: a bias with its layer's weights, whose gradient is computed
        from the same. What is not shared are integers, which a step may count with in
        its own way, and scalars, which would cost a transfer to save a few bytes.
        """
        inexact = value.dtype.is_floating or value.dtype.is_complex
        if not inexact or not value.shape.rank:
            return None
        owner = self._last_owner if value.shape.rank == 1 else None
        if owner is None:
            owner = min(self._bytes, key=self._bytes.__getitem__)
        self._own(owner, value)
        return owner

    def _of_slot(self, kwargs: dict[str, Any], primary: Any) -> Placement:
        """Returns the placement of an optimizer's slot: that of its variable."""
        placement = primary.placement.slot
        if placement.owner is None:
            return placement
        value = _initial_value(kwargs)
        inexact = value.dtype.is_floating or value.dtype.is_complex
        if not inexact or not value.shape.rank and primary.shape.rank:
            return Mirrored()
        self._own(placement.owner, value)
        return placement

    def _own(self, owner: int, value: tf.Tensor) -> None:
        """Notes that a replica owns one more variable."""
        self._bytes[owner] += (value.shape.num_elements() or 0) * value.dtype.size
        self._last_owner = owner


def _initial_value(kwargs: dict[str, Any]) -> tf.Tensor:
    """Returns the initial value, which is made once: initializers may draw numbers."""
    value = kwargs.get("initial_value")
    if callable(value):
        value = value()
        if not hasattr(value, "checkpoint_position"):
            kwargs["initial_value"] = value
    return tf.convert_to_tensor(
        getattr(value, "wrapped_value", value), kwargs.get("dtype")
    )
