# SPDX-License-Identifier: Apache-2.0
"""How a variable is created in parts, and its optimizer's slots as it is."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf, errors
from replicator.variables import drawing, in_graphs, locks
from replicator.variables.chooser import Chosen, Part
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.replicated import ReplicatedVariable
from replicator.world import World

# Creates a part, of the arguments of a variable creator.
MakePart = Callable[[dict[str, Any], Part], ReplicatedVariable]


def of_slot(primary: Any, shape: tf.TensorShape) -> Chosen | None:
    """Returns how a slot is divided: as its variable, if it has the same shape.

    Args:
        primary: The variable that the slot is of, or None.
        shape: The slot's.
    """
    if not isinstance(primary, PartitionedVariable) or primary.shape != shape:
        return None
    parts = tuple(
        Part(size, part.placement.slot, part.storage.synchronizer)
        for size, part in zip(primary.sizes, primary.parts, strict=True)
    )
    return Chosen(primary.placement, parts=parts, axis=primary.axis)


def add_slot(primary: Any, slot: PartitionedVariable) -> None:
    """Notes for each part of a variable the part of the slot that goes with it.

    Args:
        primary: The variable, or None.
        slot: What may be a slot of it, divided as it is.
    """
    if isinstance(primary, PartitionedVariable):
        primary.slots.append(weakref.ref(slot))
        for part, own in zip(primary.parts, slot.parts, strict=True):
            part.storage.add_slot(own)


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
        make_part: Creates one of them.
        kwargs: What a variable creator is given for the whole.
        chosen: The parts.
        dtype: Of the variable.
        shape: Of the variable.
        world: The replicas that use it.
        lock: Held while it is written.
    """
    axis, sizes = check(chosen, shape, str(kwargs.get("name")))
    like = _tf.unfilled(kwargs.get("name"), shape, dtype)
    draw = drawing.pieces(kwargs["initial_value"], dtype, axis, sizes)
    own = {k: v for k, v in kwargs.items() if k != "shape"}
    parts = _made(make_part, own, chosen.parts, draw, like._handle_name, dtype)
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
    """Creates all parts of a variable, in a scope of its name."""
    made = []
    own = {**kwargs, "trainable": False, "constraint": None, "dtype": dtype}
    with tf.name_scope(f"{scope}/"):
        for k, part in enumerate(parts):
            own.update(initial_value=draw[k], name=f"part_{k}")
            made.append(make_part(dict(own), part))
    return made


def undecided(chosen: Chosen, size: int) -> Chosen:
    """Returns how a variable is created that may be in parts later: as one part.

    Args:
        chosen: Where it is until then.
        size: That of its first axis.
    """
    part = Part(size, chosen.placement, chosen.synchronizer)
    return Chosen(chosen.placement, parts=(part,), axis=0, later=True)


def divide_again(
    make_part: MakePart, variable: PartitionedVariable, chosen: Chosen
) -> None:
    """Puts a variable that is one part into the parts that were decided on.

    With the same values, or in a tf.Graph with the same initial ones.

    Args:
        make_part: Creates a part.
        variable: The variable; no step runs that uses it.
        chosen: The parts; if there are none, it is whole.
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
    if not eager:  # what initializes it may be known elsewhere by now
        added = [part.initializer for part in parts]
        _tf.add_control_inputs(variable.initializer, added)
    variable.stand_for(parts, axis)


def check(chosen: Chosen, shape: tf.TensorShape, name: str) -> tuple[int, list[int]]:
    """Returns the axis and the sizes of parts.

    Raises:
        ArgumentError: They are not those of a variable of this shape.
    """
    sizes = [part.size for part in chosen.parts]
    axis = chosen.axis
    if axis is not None and shape.is_fully_defined() and 0 <= axis < shape.rank:
        if min(sizes) > 0 and sum(sizes) == shape.as_list()[axis]:
            return axis, sizes
    raise errors.ArgumentError(
        errors.compose(
            f"variable {name} of shape {shape} cannot be in parts of {sizes} along "
            f"axis {axis}.",
            [f"at {errors.user_line()}"],
            "name one of its axes, and sizes of at least 1 that add up to its length.",
        )
    )
