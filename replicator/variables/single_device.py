# SPDX-License-Identifier: Apache-2.0
"""How a program for one device sees the library's variables while it is traced.

Each is one plain variable there, whatever it is made of: all reads and writes create
the ops of a plain variable, on one handle. Which variable is behind a handle, the view
knows; so the ops can be built again for each replica (forms/). Optimizers, wrapped or
not, update like on one device.

Not everything in the block is traced: what runs under tf.init_scope, to build a layer,
say, reaches variables as it always does.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from replicator._tf import traces as tf_traces

_current: contextvars.ContextVar[View | None] = contextvars.ContextVar(
    "replicator_single_device", default=None
)


class View:
    """The variables that one trace of a program for one device uses.

    Attributes:
        compressions: What wrapped optimizers know of compressing the gradients of the
            variables that they update, by the ids of the variables.
    """

    def __init__(self) -> None:
        self._graph: tf.Graph | None = None
        # A variable's handle changes if its components move; the trace keeps the first.
        self._by_handle: dict[int, tuple[tf.Tensor, Any]] = {}
        self.compressions: dict[int, Any] = {}

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Shows variables to what is traced in this block, in the default graph.

        The user's tf.functions are traced separately here: elsewhere, their traces
        would reach one component only.
        """
        self._graph = tf.compat.v1.get_default_graph()
        traces = tf_traces.Traces()
        token = _current.set(self)
        try:
            with tf_traces.separate_traces(self._graph, "one device", traces):
                yield
        finally:
            _current.reset(token)
            traces.forget()

    def shows_here(self) -> bool:
        """Whether ops that are created now belong to the program."""
        if tf.executing_eagerly():
            return False
        graph: Any = tf.compat.v1.get_default_graph()
        while graph is not None and graph is not self._graph:
            graph = getattr(graph, "outer_graph", None)
        return graph is not None

    def enter(self, variable: Any, handle: tf.Tensor) -> tf.Tensor:
        """Notes that a variable is used by a handle, and returns the handle."""
        # What an assignment returns has the handle, too, and is no variable to keep.
        self._by_handle.setdefault(id(handle), (handle, variable))
        return handle

    def variable_of(self, tensor: tf.Tensor) -> Any:
        """Returns the library's variable behind a tensor that the trace captures.

        Args:
            tensor: A captured tensor, as it is outside the trace.

        Returns:
            A ReplicatedVariable or PartitionedVariable, or None: the tensor is no
            handle, or is that of a variable of another kind.
        """
        _, variable = self._by_handle.get(id(tensor), (None, None))
        return variable

    def note_compression(self, variables: Iterable[Any], compression: Any) -> None:
        """Notes how an optimizer compresses the gradients of variables."""
        self.compressions.update({id(v): compression for v in variables})


def view() -> View | None:
    """Returns the view of the program for one device that is being traced, or None."""
    current = _current.get()
    return current if current is not None and current.shows_here() else None
