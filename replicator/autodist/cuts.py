# SPDX-License-Identifier: Apache-2.0
"""Asks a strategy about the variables of a single-device graph.

By now everything a builder may ask is known: the graph is complete, its gradients are
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
    """How a variable is partitioned.

    Attributes:
        axis: The axis along which it is split.
        sizes: The sizes of the parts along that axis.
        shape: The shape of the whole.
        names: The names of the parts.
    """

    axis: int
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    names: tuple[str, ...]

    def shape_of(self, k: int) -> list[int]:
        """Returns the shape of part k."""
        part_shape = list(self.shape)
        part_shape[self.axis] = self.sizes[k]
        return part_shape


@dataclasses.dataclass(frozen=True)
class Decided:
    """The decisions on the variables of a program.

    Attributes:
        chosen: The choice for each whole variable and each part, by name.
        cuts: How variables are partitioned, by name, for those that are.
        slots: Maps names of slots to those of their variables, both wholes and parts.
    """

    chosen: Mapping[str, Chosen]
    cuts: Mapping[str, Cut]
    slots: Mapping[str, str]


def decide(program: Program, chooser: StrategyChooser | None) -> Decided:
    """Asks a strategy about all variables of a program.

    Args:
        program: The single-device graph, the default graph.
        chooser: The strategy; None if there is none.

    Raises:
        StrategyError: A decision does not fit the variables or the devices.
    """
    slots = program.slots
    if chooser is None:
        return Decided({}, {}, slots)
    choices: dict[str, Chosen] = {}
    cuts: dict[str, Cut] = {}
    for name, chosen in chooser.choose_all(_facts(program)).items():
        divided_names = [name]
        if len(chosen.parts) > 1:
            divided_names = _together(program, name)
            division.check(chosen, program.variables[name].shape, name)
            obstacle = uses.obstacle(program, divided_names)
            if obstacle is not None:
                _warn(name, obstacle)
                divided_names = [name]
                chosen = Chosen(chosen.placement)
        if len(chosen.parts) == 1:
            part = chosen.parts[0]
            chosen = Chosen(part.placement, part.synchronizer)
        if not chosen.parts:
            choices[name] = _followed(program, name, chosen)
            continue
        for divided_name in divided_names:
            cuts[divided_name] = _cut(program, divided_name, chosen)
        for path, part in zip(cuts[name].names, chosen.parts, strict=True):
            whole = Chosen(part.placement, part.synchronizer)
            choices[path] = _followed(program, name, whole)
    return Decided(choices, cuts, _slots(slots, cuts))


def _facts(program: Program) -> list[VariableFacts]:
    """Returns the facts about variables that a builder gets, in order of creation."""
    layouts: dict[str, set[str]] = {}
    for op in program.markers:
        name, part = (
            marked.text(op, key) or "" for key in (marked.GRADIENT, marked.PART)
        )
        layouts.setdefault(name, set()).add(part)
    variable_facts: list[VariableFacts] = []
    for name, variable in program.variables.items():
        dtype, shape = variable.dtype, variable.shape
        if variable.trainable and dtype.is_floating and shape.is_fully_defined():
            gradient_layouts = layouts.get(name, set())
            variable_facts.append(
                VariableFacts(
                    name,
                    shapes.defined(variable),
                    dtype.name,
                    sparse=bool(gradient_layouts) and "dense" not in gradient_layouts,
                    order=len(variable_facts),
                    nbytes=shape.num_elements() * dtype.size,
                )
            )
    return variable_facts


def _together(program: Program, name: str) -> list[str]:
    """Returns a variable and the slots of its shape, which are partitioned like it."""
    shape = program.variables[name].shape
    slots = [slot for slot, primary in program.slots.items() if primary == name]
    program_slots = [slot for slot in slots if slot in program.variables]
    return [name, *(s for s in program_slots if program.variables[s].shape == shape)]


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
    """Maps names of slots to those of their variables, for wholes and for parts."""
    primaries: dict[str, str] = {}
    for slot, primary in slots.items():
        if slot in cuts:
            primaries.update(zip(cuts[slot].names, cuts[primary].names, strict=True))
        elif primary not in cuts:
            primaries[slot] = primary
    return primaries


def _followed(program: Program, name: str, chosen: Chosen) -> Chosen:
    """Returns a decision without the features that are unsupported here.

    Args:
        program: The single-device graph.
        name: The name of the whole variable.
        chosen: The decision for it, or for a part of it.
    """
    placement, synchronizer = chosen.placement, chosen.synchronizer
    compressor = specs.compressor(
        f"the synchronizer of {name}", synchronizer.compressor or None
    )
    if compressor is not None and not isinstance(compressor, Cast):
        _tell(
            name,
            f"its gradient is sent as it is, since {compressor} is unsupported",
            "sessions",
        )
        synchronizer = dataclasses.replace(synchronizer, compressor="")
    if placement.has_copies and not proxies.can_follow(program, name):
        _tell(
            name,
            "replicas have no copies of it, since copies are unsupported",
            "control flow that uses it",
        )
        placement = placement.slot  # the same placement without copies
    return dataclasses.replace(chosen, placement=placement, synchronizer=synchronizer)


def _tell(name: str, what: str, where: str) -> None:
    logging.warning(
        "The strategy for %s is only partly followed: %s in %s.",
        *(name, what, where),
    )


def _warn(name: str, op: tf.Operation) -> None:
    logging.warning(
        "%s is kept whole, not in parts as the strategy says: it is used by %s (%s), "
        "which does not accept parts. Its values are the same; it needs more memory on "
        "one device.",
        *(name, op.type, errors.line_of(op)),
    )


@dataclasses.dataclass(frozen=True)
class InParts:
    """A partitioned variable as strategies describe it.

    Attributes:
        parts: ReplicatedVariables.
        axis: The axis along which they are joined.
        sizes: The sizes of the parts along that axis.
        shape: The shape of the whole.
        dtype: The dtype of the whole.
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
        decided: How its variables are partitioned.
        made: ReplicatedVariables for wholes and parts, by name.
    """
    variables: dict[str, Any] = {}
    for facts in _facts(program):
        cut = decided.cuts.get(facts.path)
        if cut is None:
            variables[facts.path] = made[facts.path]
            continue
        variable = program.variables[facts.path]
        parts = tuple(made[name] for name in cut.names)
        layout = cut.axis, cut.sizes, variable.shape, variable.dtype
        variables[facts.path] = InParts(parts, *layout)
    return variables
