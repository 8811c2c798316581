# SPDX-License-Identifier: Apache-2.0
"""PartitionedVariable: parts along one axis, placed separately, seen as one variable.

Each part is a ReplicatedVariable with a placement of its own. The whole has a handle
that never gets a value and takes no memory; tapes, tf.gradients, optimizers and Keras
identify the variable by it. Reads join the parts, lookups go to the owners of the rows,
and assigned values are split.

AutoDist calls this a partitioned variable (Zhang et al. 2020), FSDP a sharded one.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator import arguments, context
from replicator._tf import autograph, callers, state, variables
from replicator.graph.ir import shapes
from replicator.graph.ir.placeholder import NO_POLICY, OperandPolicy
from replicator.graph.passes.rows import offsets_of
from replicator.variables import (
    additions,
    handles,
    initial_values,
    joining,
    locks,
    part_writes,
    saving,
    seen_as_one,
    single_device,
)
from replicator.variables.chooser import Description
from replicator.variables.replicated import ReplicatedVariable
from replicator.world import World


class PartitionedVariable(part_writes.SplitWriter, seen_as_one.SeenAsOne):
    """A tf.Variable in parts.

    Creating a variable under the context of a Replicator makes one if the Replicator's
    strategy says so.

    Attributes:
        parts: The parts, in order.
        layout: The axis along which they are joined, and their sizes along it.
        world: The replicas that use the variable.
        slots: The slots that optimizers have created for it, in the same parts.
    """

    def __init__(
        self,
        *,
        like: Any,
        parts: Sequence[ReplicatedVariable],
        description: Description,
        world: World,
        lock: locks.StepLock,
        **facts: Any,
    ) -> None:
        super().__init__(like=like, **facts)
        self.world, self.placement = world, description.placement
        self._lock = lock
        self.slots: list[weakref.ref[PartitionedVariable]] = []
        self.unbuilt = None
        self.stand_for(parts, description)

    def stand_for(
        self, parts: Sequence[ReplicatedVariable], description: Description
    ) -> None:
        """Sets or replaces the parts.

        Args:
            parts: The parts, which hold the variable's value.
            description: How they are joined.
        """
        assert description.layout is not None, "in parts"
        self.parts, self.layout = tuple(parts), description.layout
        if self._in_graph_mode:
            self._graph_element = self.read_value()

    @property
    def key(self) -> str:
        """A key that is unique to the variable, whatever its name."""
        return f"{self.parts[0].key}, and what belongs to it"

    @property
    def how_split(self) -> str:
        """Says for messages how it is split: "is split into 2 parts"."""
        if len(self.parts) == 1:
            return "was created such that its strategy can split it (may_divide)"
        return f"is split into {len(self.parts)} parts"

    @property
    def description(self) -> Description:
        """Where the variable is and how its gradients are made equal."""
        parts = tuple(part.description for part in self.parts)
        return Description(
            self.placement,
            layout=self.layout,
            parts=parts,
            undecided=parts[0].undecided,
        )

    @property
    def policy(self) -> OperandPolicy:
        """How values reduced for the whole are communicated."""
        return NO_POLICY

    @property
    def handle(self) -> tf.Tensor:
        """The handle of the whole, which has no value behind it."""
        view = single_device.view()
        if view is not None:
            return view.enter(self, self._handle)
        if context.current() is None:
            why = f"but it {self.how_split}"
            handles.check_freezing(self, why)
            handles.may_write(self, why)
        return self._handle

    @property
    def device(self) -> str:
        """The device of that handle, or "" in a program for one device."""
        return "" if self._is_plain() else str(self._handle.device)

    @property
    def op(self) -> tf.Operation:
        """The op of the whole's handle.

        tf.custom_gradient gets the op that it looks for, if it is one of a part.
        """
        name = callers.searched_op()
        components = [c for part in self.parts for c in part.components if name]
        ops = (component.op for component in components)
        return next((op for op in ops if op.name == name), self._handle.op)

    def split(self, value: Any) -> list[tf.Tensor]:
        """Splits a value of the variable's shape into a slice for each part."""
        value = tf.convert_to_tensor(arguments.native(value), self.dtype)
        if not self.shape.is_compatible_with(value.shape):
            raise ValueError(
                f"Cannot assign value to variable '{self.name}': Shape mismatch. The "
                f"variable shape {self.shape}, and the assigned value shape "
                f"{value.shape} are incompatible."
            )
        return self._pieces(value) or self.layout.split(value)

    def _pieces(self, value: tf.Tensor) -> list[tf.Tensor] | None:
        """Returns the slices that a value was just joined from, if they fit the parts.

        So a device needs those of its own parts only.
        """
        if tf.executing_eagerly() or value.op.type != "ConcatV2":
            return None
        *pieces, axis = value.op.inputs
        layout = self.layout
        sizes = tuple(shapes.sizes(piece)[layout.axis] for piece in pieces)
        is_same = sizes == layout.sizes and tf.get_static_value(axis) == layout.axis
        return pieces if is_same else None

    # --- Reading ----------------------------------------------------------------------

    def _is_plain(self) -> bool:
        return state.in_save_context() or super()._is_plain()

    def _read(self, no_copy: bool) -> tf.Tensor:
        with self._afterwards():
            return joining.joined(self)

    def _read_rows(self, indices: Any, name: str | None) -> tf.Tensor:
        with self._afterwards():
            return joining.rows(self, indices)

    def _read_slices(self, indices: Any, name: str | None) -> tf.Tensor:
        return tf.gather_nd(self.read_value(), indices, name=name)

    def numpy(self) -> Any:
        """Returns the whole value, joined on the host."""
        if not tf.executing_eagerly():
            return variables.HandleVariable.numpy(self)
        return np.concatenate([part.numpy() for part in self.parts], self.layout.axis)

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Whether all parts are initialized."""
        if self._is_plain():
            return self._plainly("is_initialized", name)
        return tf.reduce_all([part.is_initialized() for part in self.parts], name=name)

    # --- Writing ----------------------------------------------------------------------

    def _write_whole(
        self, method: str, value: Any, name: str | None, read_value: bool
    ) -> Any:
        method, value = additions.as_addition(self, method, value)
        with self._afterwards():
            slices = self.split(value)
            return self.write_parts(
                lambda part, k: getattr(part, method)(slices[k], read_value=False),
                read_value,
                method,
            )

    def write_parts(
        self,
        write: Callable[[ReplicatedVariable, int], Any],
        read_value: bool,
        method: str,
    ) -> Any:
        """Writes each part.

        Args:
            write: Writes part k and returns the op to wait for, if any.
            read_value: Whether to return the variable instead of an op.
            method: The method called on the whole, for messages.
        """
        replica = context.current()
        agreeing: Any = contextlib.nullcontext()
        if replica is not None:
            agreeing = replica.agreeing_on(self.name, method, self.key)
        with self._exclusively(), agreeing:
            writes = [write(part, k) for k, part in enumerate(self.parts)]
        if tf.executing_eagerly():
            return self if read_value else None
        group = tf.group(*(op for op in writes if op is not None))
        return _Written(self, group) if read_value else group

    def _lazy_read(self, op: tf.Operation) -> PartitionedVariable:
        """Returns the written variable, in a program for one device."""
        return _Written(self, op)

    def _assign_all(
        self,
        value: Any,
        method: str = "assign",
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        return self._write_whole(method, value, name, read_value)

    def _settle_in_graph(self) -> None:
        """Does nothing: each part settles itself when it is written."""

    def settle_if_undecided(self) -> None:
        """Settles each part that is undecided."""
        for part in self.parts:
            part.settle_if_undecided()

    # --- Saving -----------------------------------------------------------------------

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        """Has each part saved as a slice of one tensor, which checkpoints allow."""
        name = self._shared_name
        return {saving.VALUE_KEY: lambda name=name: saving.InSlices(self, name)}

    def read_on_host(self) -> tf.Tensor:
        """Returns the whole value, joined on the host so that no device holds it."""
        with tf.device(None), tf.device(initial_values.HOST):
            return self.read_value()

    @autograph.not_converted
    def load(self, value: Any, session: tf.compat.v1.Session | None = None) -> None:
        """Sets the value in a session, like tf.compat.v1.Variable.load."""
        bounds = offsets_of(self.layout.sizes)[1:]
        slices = np.split(np.asarray(value), bounds, self.layout.axis)
        for part, part_value in zip(self.parts, slices, strict=True):
            part.load(part_value, session)


# Legacy Keras goes by this name: it takes such a variable for a list of its parts.
PartitionedVariable.__name__ = "VariableInParts"


class _Written(seen_as_one.Written, PartitionedVariable):
    """A PartitionedVariable as an assignment returns it."""
