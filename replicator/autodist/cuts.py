# SPDX-License-Identifier: Apache-2.0
"""What a strategy says of the variables of a single-device graph.

Here all is known that a builder may ask: the graph is complete, its gradients are
marked, and no variable has a value yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist import marked, proxies, uses
from replicator.autodist.program import Program
from replicator.compressors import specs
from replicator.compressors.cast import Cast
from replicator.graph.ir import shapes
from replicator.strategy.choosing import StrategyChooser
from replicator.variables import division
from replicator.variables.chooser import Chosen, VariableFacts


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a variable is divided.

    Attributes:
        axis: Along which.
        sizes: Of the parts, along the axis.
        shape: Of the whole.
        names: Of the parts.
    """

    axis: int
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...]

    def shape_of(self, k: int) -> list[int]:
        """Returns the shape of part k."""
        own = list(self.shape)
        own[self.axis] = self.sizes[k]
        return own


@dataclasses.dataclass(frozen=True)
class Decided:
    """What was decided on the variables of a program.

    Attributes:
        chosen: For what is whole, and for parts, by their names.
        cuts: How variables are divided that are not whole.
        slots: Of what each part is a slot, and each whole, by their names.
    """

    chosen: Mapping[str, Chosen]
    cuts: Mapping[str, Cut]
    slots: Mapping[str, str]


def decide(program: Program, chooser: StrategyChooser | None) -> Decided:
    """Asks a strategy for all variables of a program.

    Args:
        program: The single-device graph, the default graph.
        chooser: The strategy; None: there is none.

    Raises:
        StrategyError: What it says does not fit the variables or the devices.
    """
    slots = program.slots
    if chooser is None:
        return Decided({}, {}, slots)
    made: dict[str, Chosen] = {}
    cuts: dict[str, Cut] = {}
    for name, chosen in chooser.choose_all(_facts(program)).items():
        own = [name]
        if len(chosen.parts) > 1:
            own = _together(program, name)
            division.check(chosen, program.variables[name].shape, name)
            why = uses.obstacle(program, own)
            if why is not None:
                _warn(name, why)
                own = [name]
                chosen = Chosen(chosen.placement)
        if len(chosen.parts) == 1:
            part = chosen.parts[0]
            chosen = Chosen(part.placement, part.synchronizer)
        if not chosen.parts:
            made[name] = _followed(program, name, chosen)
            continue
        for one in own:
            cuts[one] = _cut(program, one, chosen)
        for path, part in zip(cuts[name].names, chosen.parts, strict=True):
            whole = Chosen(part.placement, part.synchronizer)
            made[path] = _followed(program, name, whole)
    return Decided(made, cuts, _slots(slots, cuts))


def _facts(program: Program) -> list[VariableFacts]:
    """Returns what a builder is told, in the order of creation."""
    layouts: dict[str, set[str]] = {}
    for op in program.markers:
        name, part = (
            marked.text(op, key) or "" for key in (marked.GRADIENT, marked.PART)
        )
        layouts.setdefault(name, set()).add(part)
    made: list[VariableFacts] = []
    for name, variable in program.variables.items():
        dtype, shape = variable.dtype, variable.shape
        if variable.trainable and dtype.is_floating and shape.is_fully_defined():
            found = layouts.get(name, set())
            made.append(
                VariableFacts(
                    name,
                    shapes.defined(variable),
                    dtype.name,
                    sparse=bool(found) and "dense" not in found,
                    order=len(made),
                    nbytes=shape.num_elements() * dtype.size,
                )
            )
    return made


def _together(program: Program, name: str) -> list[str]:
    """Returns a variable and what is divided as it is: slots of the same shape."""
    shape = program.variables[name].shape
    slots = [slot for slot, primary in program.slots.items() if primary == name]
    known = [slot for slot in slots if slot in program.variables]
    return [name, *(s for s in known if program.variables[s].shape == shape)]


def _cut(program: Program, name: str, chosen: Chosen) -> Cut:
    assert chosen.axis is not None, "it has parts"
    base = f"{name}/part"
    while _is_taken(program.graph, f"{base}_0"):
        base += "_of"
    names = tuple(f"{base}_{k}" for k in range(len(chosen.parts)))
    sizes = tuple(part.size for part in chosen.parts)
    return Cut(chosen.axis, sizes, shapes.defined(program.variables[name]), names)


def _is_taken(graph: tf.Graph, name: str) -> bool:
    try:
        graph.get_operation_by_name(name)
    except KeyError:
        return False
    return True


def _slots(slots: Mapping[str, str], cuts: Mapping[str, Cut]) -> dict[str, str]:
    """Returns of what each part is a slot, and each whole."""
    made: dict[str, str] = {}
    for slot, primary in slots.items():
        if slot in cuts:
            made.update(zip(cuts[slot].names, cuts[primary].names, strict=True))
        elif primary not in cuts:
            made[slot] = primary
    return made


def _followed(program: Program, name: str, chosen: Chosen) -> Chosen:
    """Returns what of a decision can be followed, on what is no part or is one.

    Args:
        program: The single-device graph.
        name: Of the variable, as a whole.
        chosen: What was decided.
    """
    placement, how = chosen.placement, chosen.synchronizer
    given = specs.compressor(f"the synchronizer of {name}", how.compressor or None)
    if given is not None and not isinstance(given, Cast):
        _tell(name, f"its gradient is sent as it is, and not by {given}", "sessions")
        how = dataclasses.replace(how, compressor="")
    if placement.has_copies and not proxies.can_follow(program, name):
        _tell(name, "replicas have no copies of it", "control flow that uses it")
        placement = placement.slot  # which is where it is, without copies
    return dataclasses.replace(chosen, placement=placement, synchronizer=how)


def _tell(name: str, what: str, where: str) -> None:
    logging.warning(
        "The strategy for %s is not followed in all: %s, as %s cannot do with that.",
        *(name, what, where),
    )


def _warn(name: str, op: tf.Operation) -> None:
    logging.warning(
        "%s is not in parts, as the strategy has it, but whole: it is used by %s (%s), "
        "which takes no parts. Its values are the same; it needs more memory on one "
        "device.",
        *(name, op.type, errors.line_of(op)),
    )


@dataclasses.dataclass(frozen=True)
class InParts:
    """A variable in parts, as strategies describe it.

    Attributes:
        parts: ReplicatedVariables.
        axis: Along which they are joined.
        sizes: Of the parts, along the axis.
        shape: Of the whole.
        dtype: Of the whole.
    """

    parts: tuple[Any, ...]
    axis: int
    sizes: tuple[int, ...]
    shape: tf.TensorShape
    dtype: tf.DType


def trained(
    program: Program, decided: Decided, made: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the variables that a strategy decides on, by their names.

    Args:
        program: The single-device graph.
        decided: How its variables are divided.
        made: ReplicatedVariables, of wholes and of parts, by their names.
    """
    found: dict[str, Any] = {}
    for facts in _facts(program):
        cut = decided.cuts.get(facts.path)
        if cut is None:
            found[facts.path] = made[facts.path]
            continue
        variable = program.variables[facts.path]
        parts = tuple(made[name] for name in cut.names)
        own = cut.axis, cut.sizes, variable.shape, variable.dtype
        found[facts.path] = InParts(parts, *own)
    return found
