# SPDX-License-Identifier: Apache-2.0
"""Decides on variables: at creation, or once a step with their gradients is built.

A strategy may need facts that only the first step has. The states of a variable:

| state | known by | until |
|---|---|---|
| undecided | `description.undecided` | a step with its gradient is built: `follow` |
| decided | `description` | a step needs what an owner cannot give: `storage.mirror` |
| settled | `storage.settled_at` | what was built with its components is gone |

An undecided variable is where it would be without a strategy; in one part if it may be
divided. A settled one is in one of the other states, and moves no more: what needs that
is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.variables import initial_values
from replicator.variables.chooser import Chooser, Description, Later, VariableFacts
from replicator.variables.default_placement import is_inexact, nbytes_of, rule
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.placement import Aggregated, Mirrored, Placement
from replicator.variables.replicated import ReplicatedVariable
from replicator.variables.storage import Storage
from replicator.world import World

Divide = Callable[[PartitionedVariable, Description], None]


class Decisions:
    """Decides on new variables: by a strategy, else by the option `variables`.

    Args:
        world: The replicas.
        variables: Where variables live on which no strategy decides: the user's option.
        strategy: Decides on trainable variables; None if there is no strategy.
    """

    def __init__(self, world: World, variables: str, strategy: Chooser | None) -> None:
        self._rule = rule(variables, world)
        self._strategy = strategy

    def on(
        self, kwargs: dict[str, Any], primary: Any, path: str, order: Iterator[int]
    ) -> Description:
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
            return Description(Aggregated(aggregation))
        if isinstance(primary, PartitionedVariable):
            if primary.shape == initial_values.dtype_and_shape(kwargs)[1]:
                return primary.description.slot
        if isinstance(primary, ReplicatedVariable):
            return Description(self._of_slot(kwargs, primary))
        decision: Description | Later | None = None
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
                decision = self._strategy.choose(facts)
        if isinstance(decision, Description):
            return decision
        placement = self._rule.placement(lambda: _initial_value(kwargs))
        description = Description(placement, undecided=decision is not None)
        if decision is not None and decision.may_divide and sizes:
            return description.in_one_part(sizes[0])
        return description

    def has_path(self, kwargs: dict[str, Any]) -> bool:
        """Whether a variable is trainable: strategies know only those, by path."""
        return bool(kwargs.get("trainable", True))

    def _of_slot(self, kwargs: dict[str, Any], primary: Any) -> Placement:
        """Returns the placement of an optimizer's slot: with its variable."""
        placement = primary.placement.slot
        if placement.owner is None:
            return placement
        value = _initial_value(kwargs)
        if not is_inexact(value) or not value.shape.rank and primary.shape.rank:
            return Mirrored()
        self._rule.loads.add(placement.owner, nbytes_of(value))
        return placement


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


def undecided(variable: Any) -> Storage | None:
    """Returns the storage of a variable, or of its one part, if that is undecided."""
    storage: Storage = getattr(variable, "parts", (variable,))[0].storage
    return storage if storage.description.undecided else None


def follow(divide_again: Divide, variable: Any, decision: Description | None) -> bool:
    """Moves an undecided variable and its slots to where a strategy has decided.

    Args:
        divide_again: Divides a variable in parts as a decision says: the factory that
            created it does.
        variable: The variable.
        decision: The decision; None: the variable stays as without a strategy.

    Returns:
        Whether anything has changed.

    Raises:
        StrategyError: The variable can no longer be moved.
    """
    storage = undecided(variable)
    assert storage is not None, "it is decided on once"
    before = storage.description
    if decision is None:
        storage.description = dataclasses.replace(before, undecided=False)
        return False
    if isinstance(variable, PartitionedVariable):
        _check(variable, decision, storage)
        divide_again(variable, decision)
        return True
    if decision.parts:
        raise _cannot(
            variable,
            decision,
            "created whole",
            "set the builder's attribute may_divide to True; or let it decide where "
            "variables are created, from one variable at a time and without `sparse`.",
        )
    if before.placement != decision.placement:
        _check(variable, decision, storage)
        storage.move(variable, decision.placement)
        for slot in storage.slots():
            if slot.dtype.is_floating and (slot.shape.rank or not variable.shape.rank):
                slot.storage.move(slot, decision.placement.slot)
    storage.description = decision
    return dataclasses.replace(before, undecided=False) != decision


def _check(variable: Any, decision: Description, storage: Storage) -> None:
    """Raises StrategyError if earlier code relies on where a variable is."""
    settled_at = storage.relied_on()
    if settled_at is not None:
        raise _cannot(
            variable,
            decision,
            f"built before at {settled_at}",
            "build this step first; or use a strategy that decides where variables are "
            "created.",
        )


def _cannot(
    variable: Any, decision: Description, how: str, fix: str
) -> errors.StrategyError:
    parts = decision.parts
    where = f"in {len(parts)} parts" if parts else str(decision.placement)
    return errors.StrategyError(
        f"the strategy decides that variable {variable.name} is {where} when a step is "
        "built, but code that was built before relies on where it is.",
        [f"at {errors.user_line()}", how],
        fix,
    )
