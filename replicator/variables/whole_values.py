# SPDX-License-Identifier: Apache-2.0
"""Reads and writes of variables by replicas that run a program for one device.

The program's graph has one plain variable in place of each (single_device.py). A read
gives its value on every replica, or each replica a summand of it; a write gives all the
same, or summands. That they are equal follows from how the program's ops were divided
among the replicas (forms/), so nothing is compared or averaged, nor proven again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from replicator import context
from replicator.primitives import all_gather, all_reduce, broadcast
from replicator.variables import copies
from replicator.variables.placement import Write

_PROGRAM = "a program for one device"


def read(variable: Any) -> tf.Tensor:
    """Returns a variable's value on one device, or this replica's summand of it.

    Args:
        variable: A ReplicatedVariable or PartitionedVariable.
    """
    replica = context.require("a read")
    own = variable._read_variable_op()
    if not _is_combined(variable) or replica.num_replicas == 1:
        return own
    if variable.placement.grows:
        return all_gather.all_gather(own, axis=0)
    if variable.placement.is_aggregated:
        return all_reduce.combine([own], "mean", None, joinable=True)[0]
    return broadcast.broadcast(own, root=0)


def read_rows(variable: Any, indices: tf.Tensor) -> tf.Tensor:
    """Returns rows of what `read` returns, like `tf.gather`."""
    if _is_combined(variable):
        return tf.gather(read(variable), indices)
    return variable.sparse_read(indices)


def read_slices(variable: Any, indices: tf.Tensor) -> tf.Tensor:
    """Returns slices of what `read` returns, like `tf.gather_nd`."""
    if _is_combined(variable):
        return tf.gather_nd(read(variable), indices)
    return variable.gather_nd(indices)


def _is_combined(variable: Any) -> bool:
    """Whether no replica has the value, nor a summand, but all together.

    The components are equal if only such programs write them, but steps write others.
    """
    placement = getattr(variable, "placement", None)
    return placement is not None and placement.differs and not placement.adds_up


def written(variable: Any, value: Any, method: str = "assign") -> Any:
    """Returns what this replica writes, where one device writes a value.

    Args:
        variable: A ReplicatedVariable or PartitionedVariable whose value is no sum.
        value: The value, the same on all replicas.
        method: The method that writes it.
    """
    placement = getattr(variable, "placement", None)
    if placement is None or not placement.grows:
        return value
    replica = context.require("a write")
    return placement.written(value, Write.by(replica, variable, method))


class Writes:
    """The writes of one replica in one build, and the copies that they leave behind.

    Each replica may have a copy of a variable that another one owns. The owner writes;
    its new value reaches the copies before they are read, in one message with others.
    """

    def __init__(self) -> None:
        self._behind: dict[tf.Graph, dict[int, Any]] = {}

    @contextlib.contextmanager
    def writing(self, variables: Iterable[Any]) -> Iterator[None]:
        """Makes what is written in this block equal on all replicas, or summands."""
        replica = context.require("a write")
        with replica.equal_updates(_PROGRAM, proven=True):
            yield
        behind = self._behind.setdefault(tf.compat.v1.get_default_graph(), {})
        for part in _parts(variables):
            if part.placement.has_copies:
                behind[id(part)] = part

    def refresh(self, variables: Iterable[Any] | None = None) -> None:
        """Updates copies that writes have left behind.

        Call it for variables that are about to be read, and for all before a function's
        body is entered or left, and at the end.

        Args:
            variables: Only those of these variables; None: all.
        """
        replica = context.require("a write")
        wanted = None if variables is None else {id(part) for part in _parts(variables)}
        for graph, behind in self._behind.items():
            keys = [key for key in behind if wanted is None or key in wanted]
            parts = [behind.pop(key) for key in keys]
            if parts:
                with _added_to(graph):
                    copies.refresh(parts, replica)


@contextlib.contextmanager
def _added_to(graph: tf.Graph) -> Iterator[None]:
    if graph is tf.compat.v1.get_default_graph():
        yield
    else:
        with graph.as_default(), tf.control_dependencies(None):
            yield


def _parts(variables: Iterable[Any]) -> list[Any]:
    return [part for v in variables for part in getattr(v, "parts", (v,))]
