# SPDX-License-Identifier: Apache-2.0
"""Creates variables in parts, and their optimizers' slots in the same parts."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import ops, variables
from replicator.variables import drawing, in_graphs, locks
from replicator.variables.chooser import Chosen, Part
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.replicated import ReplicatedVariable
from replicator.world import World

# Creates a part from the arguments of a variable creator.
MakePart = Callable[[dict[str, Any], Part], ReplicatedVariable]


def of_slot(primary: Any, shape: tf.TensorShape) -> Chosen | None:
    """Returns how a slot is divided: like its variable, if their shapes are equal.

    Args:
        primary: The variable whose slot it is, or None.
        shape: The slot's shape.
    """
    if not isinstance(primary, PartitionedVariable) or primary.shape != shape:
        return None
    parts = tuple(
        Part(size, part.placement.slot, part.storage.synchronizer)
        for size, part in zip(primary.sizes, primary.parts, strict=True)
    )
    return Chosen(primary.placement, parts=parts, axis=primary.axis)


def add_slot(primary: Any, slot: PartitionedVariable) -> None:
    """Registers each part of a slot with the part of the variable that it belongs to.

    Args:
        primary: The variable, or None.
        slot: What may be its slot, in the same parts.
    """
    if isinstance(primary, PartitionedVariable):
        primary.slots.append(weakref.ref(slot))
        for part, slot_part in zip(primary.parts, slot.parts, strict=True):
            part.storage.add_slot(slot_part)


def create(
    make_part: MakePart,
    kwargs: dict[str, Any],
    chosen: Chosen,
    dtype: tf.DType,
    shape: tf.TensorShape,
    world: World,
    lock: locks.StepLock,
) -> PartitionedVariable:
    """Creates a variable in parts.

    Args:
        make_part: Creates one part.
        kwargs: The arguments that a variable creator gets for the whole.
        chosen: The parts.
        dtype: The variable's dtype.
        shape: The variable's shape.
        world: The replicas that use the variable.
        lock: The lock that is held while the variable is written.
    """
    axis, sizes = check(chosen, shape, str(kwargs.get("name")))
    like = variables.unfilled(kwargs.get("name"), shape, dtype)
    draw = drawing.pieces(kwargs["initial_value"], dtype, axis, sizes)
    part_kwargs = {k: v for k, v in kwargs.items() if k != "shape"}
    parts = _made(make_part, part_kwargs, chosen.parts, draw, like._handle_name, dtype)
    facts: dict[str, Any] = {
        name: kwargs[name]
        for name in ("trainable", "synchronization", "aggregation", "constraint")
        if name in kwargs
    }
    if like._in_graph_mode:
        facts["initializer_op"] = in_graphs.initializer(parts)
        like._is_initialized_op = tf.reduce_all(
            [part.is_initialized() for part in parts]
        )
    variable = PartitionedVariable(
        like=like, parts=parts, axis=axis, world=world, lock=lock, **facts
    )
    variable.placement = chosen.placement
    return variable


def _made(
    make_part: MakePart,
    kwargs: dict[str, Any],
    parts: Sequence[Part],
    draw: Sequence[Callable[[], tf.Tensor]],
    scope: str,
    dtype: tf.DType,
) -> list[ReplicatedVariable]:
    """Creates all parts of a variable, in a name scope of the variable's name."""
    made = []
    part_kwargs = {**kwargs, "trainable": False, "constraint": None, "dtype": dtype}
    with tf.name_scope(f"{scope}/"):
        for k, part in enumerate(parts):
            part_kwargs.update(initial_value=draw[k], name=f"part_{k}")
            made.append(make_part(dict(part_kwargs), part))
    return made


def undecided(chosen: Chosen, size: int) -> Chosen:
    """Returns how to create a variable that may be divided later: as one part.

    Args:
        chosen: Where the variable is until then.
        size: The size of its first axis.
    """
    part = Part(size, chosen.placement, chosen.synchronizer)
    return Chosen(chosen.placement, parts=(part,), axis=0, later=True)


def divide_again(
    make_part: MakePart, variable: PartitionedVariable, chosen: Chosen
) -> None:
    """Divides a variable of one part into the parts that were decided on.

    The values stay the same; in a tf.Graph, the initial values.

    Args:
        make_part: Creates a part.
        variable: The variable; no step that uses it is running.
        chosen: The parts; without parts, the variable becomes whole.
    """
    if not chosen.parts:
        size = variable.shape.as_list()[0]
        chosen = dataclasses.replace(undecided(chosen, size), later=False)
    axis, sizes = check(chosen, variable.shape, variable.name)
    (old,) = variable.parts
    first = old.storage.first
    eager = tf.executing_eagerly()
    value = first.read_value() if eager else first.initial_value
    draw = drawing.pieces(value, variable.dtype, axis, sizes)
    scope = variable._handle_name.removesuffix(":0")
    facts = {"synchronization": old.synchronization, "aggregation": old.aggregation}
    parts = _made(make_part, facts, chosen.parts, draw, scope, variable.dtype)
    if not eager:  # other code may already hold the initializer, so extend it
        initializers = [part.initializer for part in parts]
        for part in parts:
            part.storage.late = True
        ops.add_control_inputs(variable.initializer, initializers)
    variable.stand_for(parts, axis)


def check(chosen: Chosen, shape: tf.TensorShape, name: str) -> tuple[int, list[int]]:
    """Returns the axis and the sizes of parts.

    Raises:
        ArgumentError: A variable of this shape cannot be divided into these parts.
    """
    sizes = [part.size for part in chosen.parts]
    axis = chosen.axis
    if axis is not None and shape.is_fully_defined() and 0 <= axis < shape.rank:
        if min(sizes) > 0 and sum(sizes) == shape.as_list()[axis]:
            return axis, sizes
    raise errors.ArgumentError(
        errors.compose(
            f"variable {name} of shape {shape} cannot be split into parts of {sizes} "
            f"along axis {axis}.",
            [f"at {errors.user_line()}"],
            "name one of its axes, and sizes of at least 1 that add up to its length.",
        )
    )
