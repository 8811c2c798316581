# SPDX-License-Identifier: Apache-2.0
"""How replicated variables are saved, copied, and told apart in traces.

A copy by copy.deepcopy (target networks, twins, snapshots) is a variable of the same
Replicator, inside its context and outside of it, with the value and the placement of
the original: an optimizer's slots that are copied with their variable stay with it.
Like tf.Variable, it can be copied eagerly only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator._tf import autograph, callers, state, variables
from replicator.graph.passes.rows import Parts

VALUE_KEY = "VARIABLE_VALUE"  # tf.train.Checkpoint's name for a variable's value


class ThisVariable(tf.types.experimental.TraceType):
    """Makes the variable itself the key under which a tf.function caches its trace.

    A plain variable is passed as its handle, but a replicated one has several handles.
    """

    def __init__(self, variable: Any) -> None:
        self._variable = weakref.ref(variable)
        self._key = variable._unique_id

    def is_subtype_of(self, other: Any) -> bool:
        """Whether it is the same variable."""
        return self == other

    def most_specific_common_supertype(self, others: Sequence[Any]) -> Any:
        """Returns itself if all are the same variable."""
        return self if all(self == other for other in others) else None

    def placeholder_value(self, placeholder_context: Any) -> Any:
        """Returns the variable, which represents itself in a trace."""
        return self._variable()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ThisVariable) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


class Saveable(state.SaveableObject):
    """Saves and restores a ReplicatedVariable for the v1 Saver, as a plain variable."""

    def __init__(self, variable: Any, name: str) -> None:
        self._variable = variable
        variable.settle_if_undecided()
        value = variable.read_value
        if not tf.executing_eagerly():  # read here, before the graph is finalized
            grows = variable.placement.grows
            value = variable.read_value() if grows else variable._graph_element
        info = variable.slice_info if name == variable._shared_name else None
        spec = state.SaveSpec(
            value,
            "" if info is None else info.spec,
            name if info is None else info.full_name,
            dtype=variable.dtype,
            device=variable._handle.device,
        )
        super().__init__(variable, [spec], name)

    def restore(
        self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any
    ) -> Any:
        """Writes the saved value into every component."""
        value = restored_tensors[0]
        if restored_shapes is not None:
            value = tf.reshape(value, restored_shapes[0])
        return self._variable.restore(value)


def slice_specs(shape: tf.TensorShape, layout: Parts) -> list[str]:
    """Returns how files describe the parts of one tensor.

    Args:
        shape: The shape of the whole.
        layout: How it is divided.

    Returns:
        For each part the shape of the whole, and the part's offset and size on each
        axis: "9 4 3,1:-" for row 3 of 9.
    """
    whole = " ".join(map(str, shape.as_list()))
    specs, offset = [], 0
    for size in layout.sizes:
        extents = ["-"] * shape.rank
        extents[layout.axis] = f"{offset},{size}"
        specs.append(f"{whole} {':'.join(extents)}")
        offset += size
    return specs


def _within(info: Any, layout: Parts) -> list[str]:
    """Returns how files describe the parts of a slice of one tensor.

    Args:
        info: The tf.Variable.SaveSliceInfo of the slice.
        layout: How it is divided.
    """
    specs, offsets, extents = [], list(info.var_offset), list(info.var_shape)
    for size in layout.sizes:
        extents[layout.axis] = size
        part = tf.Variable.SaveSliceInfo(
            info.full_name, info.full_shape, list(offsets), list(extents)
        )
        specs.append(part.spec)
        offsets[layout.axis] += size
    return specs


class InSlices(state.SaveableObject):
    """Saves and restores a PartitionedVariable, its parts as slices of one tensor."""

    def __init__(self, variable: Any, name: str) -> None:
        self._variable = variable
        eager = tf.executing_eagerly()
        layout = variable.layout
        slices = slice_specs(variable.shape, layout)
        name_in_file = name
        if variable.slice_info is not None and name == variable._shared_name:
            name_in_file = variable.slice_info.full_name
            slices = _within(variable.slice_info, layout)
        # A sharded v1 Saver, like that of monitored sessions, takes only one device.
        first = variable.parts[0]._handle.device
        specs = [
            state.SaveSpec(
                part.read_value if eager else part._graph_element,
                slices[k],
                name_in_file,
                dtype=part.dtype,
                device=part._handle.device if eager else first,
            )
            for k, part in enumerate(variable.parts)
        ]
        super().__init__(variable, specs, name)

    def restore(
        self, restored_tensors: Sequence[tf.Tensor], restored_shapes: Any
    ) -> Any:
        """Writes to each part what was saved of it, in whatever parts it was saved."""
        if len(restored_tensors) < len(
            self.specs
        ):  # init_from_checkpoint reads a whole
            (whole,) = restored_tensors
            restored_tensors = self._variable.layout.split(whole)
        pairs = zip(self._variable.parts, restored_tensors, strict=True)
        writes = [part.restore(value) for part, value in pairs]
        return None if tf.executing_eagerly() else tf.group(*writes)


class SavedAsOne(variables.HandleVariable):
    """Lets ReplicatedVariable and PartitionedVariable be saved as one value."""

    unbuilt: Any
    storage: Any
    creator: Callable[..., Any]  # of the VariableFactory that created it
    # The place in a whole, for what v1's get_variable creates with a partitioner.
    slice_info: Any = None

    @property
    def _save_slice_info(self) -> Any:
        """What the v1 Saver and optimizers know as `slice_info`.

        A Saver would save and restore a slice through one handle, so it is not told
        that this is one, and asks for the Saveable instead.
        """
        if self.slice_info is None:
            return None
        module, function = callers.asker("_save_slice_info")
        if module != "tensorflow.python.training.saving.saveable_object_util":
            return self.slice_info
        if function == "saveable_objects_for_op":
            raise errors.UnsupportedError(
                "a Saver was given a variable with a partitioner, whose part "
                f"{self.name} has a component on each replica.",
                fix="give it the parts, Saver(list(variable)), or no list at all.",
            )
        # op_list_to_dict finds out how to save the variables in a list.
        return None if function == "op_list_to_dict" else self.slice_info

    @_save_slice_info.setter
    def _save_slice_info(self, info: Any) -> None:
        self.slice_info = info

    def _settle_in_graph(self) -> None:
        """Settles the placement, as permanent code is about to use all components."""
        if not tf.executing_eagerly():
            self.storage.settle()

    def settle_if_undecided(self) -> None:
        """Settles an undecided placement, as permanent code is about to read it."""
        if not tf.executing_eagerly() and self.storage.description.undecided:
            self.storage.settle()

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {VALUE_KEY: self.read_on_host()}

    def read_on_host(self) -> tf.Tensor:
        """Returns the value to save."""
        return self.read_value()

    def _restore_from_tensors(self, restored: dict[str, tf.Tensor]) -> Any:
        return self.restore(restored[VALUE_KEY])

    def restore(self, value: tf.Tensor) -> Any:
        """Writes a checkpoint's value into every component.

        Args:
            value: The value, of the variable's shape and dtype.

        Returns:
            The op that writes it, in a graph; None when executing eagerly.

        Raises:
            ValueError: The shape does not fit.
        """
        if not self.shape.is_compatible_with(value.shape):
            raise ValueError(
                f"A checkpoint's tensor of shape {value.shape} does not fit variable "
                f"{self.name} of shape {self.shape}."
            )
        with context.building(None):
            return self._assign_all(value, read_value=False)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        """Gives the v1 Saver a Saveable; it would restore only component 0 itself."""
        return {VALUE_KEY: lambda name=self._shared_name: Saveable(self, name)}

    @autograph.not_converted
    def load(self, value: Any, session: tf.compat.v1.Session | None = None) -> None:
        """Sets the value in a session, like tf.compat.v1.Variable.load."""
        if self.placement.differs:
            raise errors.ReplicatorError(
                f"the replicas' values of variable {self.name} differ; it cannot be "
                "loaded.",
                fix="run its assign(value) in the session.",
            )
        self.storage.settle()
        for component in self.outside:
            component.load(value, session)

    def __tf_tracing_type__(self, signature_context: Any) -> Any:
        return ThisVariable(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> tf.Variable:
        return copied(self)


def copied(variable: Any) -> Any:
    """Returns a new variable with a variable's value.

    Args:
        variable: A ReplicatedVariable or a PartitionedVariable.

    Raises:
        ContextError: In a step, or in a graph.
    """
    if context.current() is not None or not tf.executing_eagerly():
        raise errors.ContextError(
            f"variable {variable.name} is copied in a step, a tf.function or a "
            "tf.Graph: the copy would be a new variable each time.",
            fix="copy it before, while TensorFlow executes eagerly.",
        )
    description = variable.description
    differs = variable.placement.differs
    new = variable.creator(
        None,
        # What replicas have of their own is copied below; a read would combine it.
        initial_value=(
            variable.storage.first.read_value() if differs else variable.read_on_host()
        ),
        name=variable._shared_name,
        dtype=variable.dtype,
        shape=variable.shape,
        trainable=variable.trainable,
        constraint=variable.constraint,
        synchronization=variable.synchronization,
        aggregation=variable.aggregation,
        # A strategy that has yet to decide on the variable decides on the copy, too.
        description=None if description.undecided else description,
    )
    if differs:
        for to, of in zip(new.components, variable.components, strict=True):
            to.assign(of.read_value())
    return new
