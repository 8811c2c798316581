# SPDX-License-Identifier: Apache-2.0
"""Decides the placement and synchronizer of a variable that is being created."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from replicator.costs import cost, rehearsal
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
        variables: Where variables live on which no strategy decides: the user's option.
        strategy: Decides on trainable variables; None if there is no strategy.
    """

    def __init__(self, world: World, variables: str, strategy: Chooser | None) -> None:
        are_several = world.num_replicas > 1 or rehearsal.is_on()
        self._sharded = are_several and cost.shards(variables, world.devices)
        self._strategy = strategy
        self._bytes = dict.fromkeys(world.local, 0)  # that each replica owns
        self._last_owner: int | None = None

    def on(
        self, kwargs: dict[str, Any], primary: Any, path: str, order: Iterator[int]
    ) -> Chosen:
        """Returns the decision on a variable.

        Args:
            kwargs: The creator's arguments; a computed initial value replaces its
                function, so that it is computed once.
            primary: The variable whose optimizer slot this one is, if it is one.
            path: The variable's path.
            order: Counts the variables that the strategy is asked about.
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
            # A variable that will be in parts must not be drawn whole.
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
        undecided = Chosen(placement, later=later)
        return division.undecided(undecided, sizes[0]) if divides else undecided

    def has_path(self, kwargs: dict[str, Any]) -> bool:
        """Whether a variable is trainable: strategies know only those, by path."""
        return bool(kwargs.get("trainable", True))

    def _owner(self, value: tf.Tensor) -> int | None:
        """Returns the replica that shall own a variable; None if each gets its own.

        Replicas own about the same number of bytes. A vector goes to the owner of the
        variable before it: a bias to that of its layer's weights, whose gradient is
        computed from the same tensors. Two kinds are not sharded: integers, which a
        step may use as counters in its own way, and scalars, which would cost a
        transfer to save a few bytes.
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
        """Returns the placement of an optimizer's slot: with its variable."""
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
    """Computes the initial value only once, as initializers may draw random numbers."""
    value = kwargs.get("initial_value")
    if callable(value):
        value = value()
        if not hasattr(value, "checkpoint_position"):
            kwargs["initial_value"] = value
    return tf.convert_to_tensor(
        getattr(value, "wrapped_value", value), kwargs.get("dtype")
    )
