# SPDX-License-Identifier: Apache-2.0
"""Moves and divides variables that a strategy decides on after their creation."""

from __future__ import annotations

from typing import Any

from replicator import errors
from replicator.variables.chooser import Chosen
from replicator.variables.creation import VariableFactory
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.placement import Placement
from replicator.variables.storage import Storage


def undecided(variable: Any) -> list[Any]:
    """Returns a variable's parts, or itself, that a strategy has yet to decide on."""
    parts = getattr(variable, "parts", (variable,))
    return [part for part in parts if part.storage.undecided]


def follow(factory: VariableFactory, variable: Any, chosen: Chosen) -> bool:
    """Moves a variable and its slots to where a strategy has decided.

    Args:
        factory: The factory that created the variable.
        variable: The variable, created before the decision.
        chosen: The decision.

    Returns:
        Whether anything has changed.

    Raises:
        StrategyError: The variable can no longer be moved.
    """
    if isinstance(variable, PartitionedVariable):
        return _divide(factory, variable, chosen)
    storage = variable.storage
    moves: list[tuple[Any, Placement]] = []
    if storage.placement != chosen.placement:
        moves = [(variable, chosen.placement)]
        moves += [
            (slot, chosen.placement.slot)
            for slot in storage.slots()
            if slot.dtype.is_floating and (slot.shape.rank or not variable.shape.rank)
        ]
    if chosen.parts:
        raise _cannot(
            variable,
            chosen,
            "created whole",
            "set the builder's attribute may_divide to True; or let it decide where "
            "variables are created, from one variable at a time and without `sparse`.",
        )
    if moves:
        _check(variable, chosen, storage)
    storage.undecided = False
    for moved, placement in moves:
        moved.storage.move(moved, placement)
    changed = bool(moves) or storage.synchronizer != chosen.synchronizer
    storage.synchronizer = chosen.synchronizer
    return changed


def _divide(
    factory: VariableFactory, variable: PartitionedVariable, chosen: Chosen
) -> bool:
    """Divides a variable that has been one part so far."""
    part = variable.parts[0]
    if not part.storage.undecided:
        return False  # divided in an earlier attempt that failed at another variable
    _check(variable, chosen, part.storage)
    factory.divide_again(variable, chosen)
    return True


def _check(variable: Any, chosen: Chosen, storage: Storage) -> None:
    """Raises StrategyError if earlier code relies on where a variable is."""
    settled_at = storage.relied_on()
    if settled_at is not None:
        raise _cannot(
            variable,
            chosen,
            f"built before at {settled_at}",
            "build this step first; or use a strategy that decides where variables are "
            "created.",
        )


def _cannot(variable: Any, chosen: Chosen, how: str, fix: str) -> errors.StrategyError:
    where = f"in {len(chosen.parts)} parts" if chosen.parts else str(chosen.placement)
    return errors.StrategyError(
        errors.compose(
            f"the strategy decides that variable {variable.name} is {where} when a "
            "step is built, but code that was built before relies on where it is.",
            [f"at {errors.user_line()}", how],
            fix,
        )
    )
