# SPDX-License-Identifier: Apache-2.0
"""The base of ReplicatedVariable and PartitionedVariable: several, seen as one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator._tf import autograph, variables
from replicator.variables import locks, saving, single_device


class SeenAsOne(saving.SavedAsOne):
    """A tf.Variable made of other variables.

    Subclasses implement `_read` and `_write_whole`, for the whole value, and
    `_read_rows`, `_read_slices` and `_write_piece`.
    """

    _lock: locks.StepLock

    def _distributed_container(self) -> SeenAsOne:
        """The variable that optimizers are to key their slots by."""
        return self

    def _afterwards(self) -> contextlib.AbstractContextManager[None]:
        """Returns a block whose ops run after the write that this object represents."""
        return contextlib.nullcontext()

    def _is_plain(self) -> bool:
        """Whether the code being built has one plain variable in its place."""
        return single_device.view() is not None

    def _plainly(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the method of a plain variable, for a program for one device."""
        with self._afterwards():
            return getattr(variables.HandleVariable, method)(self, *args, **kwargs)

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        if self._is_plain():
            return self._plainly("_read_variable_op", no_copy)
        return self._read(no_copy)

    @autograph.not_converted
    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Gathers the rows `indices` of the value."""
        if self._is_plain():
            return self._plainly("sparse_read", indices, name)
        return self._read_rows(indices, name)

    @autograph.not_converted
    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        """Gathers the slices `indices` of the value."""
        if self._is_plain():
            return self._plainly("gather_nd", indices, name)
        return self._read_slices(indices, name)

    def _exclusively(self) -> contextlib.AbstractContextManager[None]:
        """Returns a block that keeps other threads from writing it, when eager."""
        return self._lock if tf.executing_eagerly() else contextlib.nullcontext()

    @autograph.not_converted
    def assign(
        self,
        value: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Sets the value; see the class's module for what happens inside a step."""
        return self._write("assign", value, name, read_value)

    @autograph.not_converted
    def assign_add(
        self,
        delta: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Adds `delta`."""
        return self._write("assign_add", delta, name, read_value)

    @autograph.not_converted
    def assign_sub(
        self,
        delta: Any,
        use_locking: bool | None = None,
        name: str | None = None,
        read_value: bool = True,
    ) -> Any:
        """Subtracts `delta`."""
        return self._write("assign_sub", delta, name, read_value)

    def _write(
        self, method: str, value: Any, name: str | None, read_value: bool
    ) -> Any:
        """Writes the value by `method`: assign, assign_add or assign_sub."""
        if self._is_plain():
            return self._plainly(method, value, name=name, read_value=read_value)
        return self._write_whole(method, value, name, read_value)

    def _read(self, no_copy: bool) -> tf.Tensor:
        """Reads the value."""
        raise NotImplementedError

    def _read_rows(self, indices: Any, name: str | None) -> tf.Tensor:
        """Gathers rows of the value."""
        raise NotImplementedError

    def _read_slices(self, indices: Any, name: str | None) -> tf.Tensor:
        """Gathers slices of the value."""
        raise NotImplementedError

    def _write_whole(
        self, method: str, value: Any, name: str | None, read_value: bool
    ) -> Any:
        """Writes the value by a method of plain variables."""
        raise NotImplementedError

    def _write_piece(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Writes a piece of the value, like tf.Variable's method of that name."""
        raise NotImplementedError


class Written(SeenAsOne):
    """A variable as an assignment in a graph returns it: reads come after the write."""

    def __init__(self, variable: SeenAsOne, done: tf.Operation) -> None:
        self.__dict__.update(variable.__dict__)
        self._done = done
        if self._in_graph_mode:
            self._graph_element = self.read_value()

    @property
    def op(self) -> tf.Operation:
        """The op that wrote the variable."""
        return self._done

    def _afterwards(self) -> contextlib.AbstractContextManager[None]:
        return tf.control_dependencies([self._done])


def _piece_writer(method: str) -> Callable[..., Any]:
    """Returns a method that writes a piece of a variable."""

    def write_piece(self: SeenAsOne, *args: Any, **kwargs: Any) -> Any:
        if self._is_plain():
            return self._plainly(method, *args, **kwargs)
        with self._afterwards():
            return self._write_piece(method, *args, **kwargs)

    write_piece.__name__ = method
    write_piece.__doc__ = f"As tf.Variable.{method}; see the class's module."
    return autograph.not_converted(write_piece)


for _method in (
    "scatter_add scatter_sub scatter_update scatter_max scatter_min scatter_mul "
    "scatter_div batch_scatter_update scatter_nd_add scatter_nd_sub scatter_nd_update "
    "scatter_nd_max scatter_nd_min _strided_slice_assign"
).split():
    setattr(SeenAsOne, _method, _piece_writer(_method))


def _to_tensor(
    variable: SeenAsOne,
    dtype: Any = None,
    name: Any = None,
    as_ref: bool = False,
) -> Any:
    """Reads the variable where a tensor is expected."""
    if as_ref:  # only the v1 Saver passes this, if it was given {name: variable}
        raise errors.ReplicatorError(
            f"a Saver cannot rename the replicated variable {variable.name}.",
            fix="give it a list of variables instead of a dictionary.",
        )
    return variable._dense_var_to_tensor(dtype, name)


tf.register_tensor_conversion_function(SeenAsOne, _to_tensor)
