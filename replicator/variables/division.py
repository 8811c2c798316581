# SPDX-License-Identifier: Apache-2.0
"""Creates variables in parts, and their optimizers' slots in the same parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import ops, variables
from replicator.variables import in_graphs, initial_values, locks
from replicator.variables.chooser import Description
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.replicated import ReplicatedVariable
from replicator.world import World

# Creates a part from the arguments of a variable creator.
MakePart = Callable[[dict[str, Any], Description], ReplicatedVariable]


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
    description: Description,
    dtype: tf.DType,
    shape: tf.TensorShape,
    world: World,
    lock: locks.StepLock,
) -> PartitionedVariable:
    """Creates a variable in parts.

    Args:
        make_part: Creates one part.
        kwargs: The arguments that a variable creator gets for the whole.
        description: The parts, which fit the variable.
        dtype: The variable's dtype.
        shape: The variable's shape.
        world: The replicas that use the variable.
        lock: The lock that is held while the variable is written.
    """
    assert description.layout is not None, "in parts"
    like = variables.unfilled(kwargs.get("name"), shape, dtype)
    draw = initial_values.pieces(kwargs["initial_value"], dtype, description.layout)
    own = {k: v for k, v in kwargs.items() if k != "shape"}
    parts = _made(make_part, own, description.parts, draw, like._handle_name, dtype)
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
    return PartitionedVariable(
        like=like,
        parts=parts,
        description=description,
        world=world,
        lock=lock,
        **facts,
    )


def _made(
    make_part: MakePart,
    kwargs: dict[str, Any],
    parts: Sequence[Description],
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


def divide_again(
    make_part: MakePart, variable: PartitionedVariable, description: Description
) -> None:
    """Divides a variable of one part into the parts that were decided on.

    The values stay the same; in a tf.Graph, the initial values.

    Args:
        make_part: Creates a part.
        variable: The variable; no step that uses it is running.
        description: The parts; without parts, the variable becomes whole.
    """
    if description.layout is None:
        description = description.in_one_part(variable.shape.as_list()[0])
    assert description.layout is not None, "in parts"
    (old,) = variable.parts
    first = old.storage.first
    eager = tf.executing_eagerly()
    value = first.read_value() if eager else first.initial_value
    draw = initial_values.pieces(value, variable.dtype, description.layout)
    scope = variable._handle_name.removesuffix(":0")
    facts = {"synchronization": old.synchronization, "aggregation": old.aggregation}
    parts = _made(make_part, facts, description.parts, draw, scope, variable.dtype)
    if not eager:  # other code may already hold the initializer, so extend it
        initializers = [part.initializer for part in parts]
        for part in parts:
            part.storage.late = True
        ops.add_control_inputs(variable.initializer, initializers)
    variable.stand_for(parts, description)
