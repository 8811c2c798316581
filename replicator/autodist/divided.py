# SPDX-License-Identifier: Apache-2.0
"""A single-device graph with variables of it in parts: another single-device graph.

What the user's ops are in it is known by these; replicas are copies of it. Each part is
a variable of its own there, and nothing behind it need know that it is a part.

Source: the partitioner of AutoDist (Zhang et al. 2020), which transforms a graph of one
device before it is replicated, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import part_ops
from replicator.autodist.cuts import Decided
from replicator.autodist.part_markers import Markers
from replicator.autodist.program import Program
from replicator.autodist.rewriting import Handles, Rewriter
from replicator.autodist.taken import Gradient


@dataclasses.dataclass(frozen=True)
class Known:
    """A variable of the graph; a part of one of the user's, or one that is whole.

    Attributes:
        op: Makes its handle.
        initializer: Initializes it.
        shape: Its shape.
        dtype: Its dtype.
        trainable: Whether optimizers update it.
        aggregation: As of the user's.
    """

    op: tf.Operation
    initializer: tf.Operation
    shape: tf.TensorShape
    dtype: tf.DType
    trainable: bool
    aggregation: Any


class Divided:
    """A graph in which variables are in parts.

    Args:
        original: The user's graph.
        decided: How its variables are divided.
        whole: What writes values that are not to be divided before.

    Attributes:
        program: What it holds.
        places: What the user's ops are in it.
    """

    def __init__(
        self, original: Program, decided: Decided, whole: Collection[tf.Operation]
    ) -> None:
        self._cuts = decided.cuts
        self._graph = tf.Graph()
        self._markers = Markers(decided.cuts)
        self._made = Rewriter(original.graph, self._graph, self._divide)
        self._made.whole = frozenset(whole)
        self._parts: dict[str, Handles] = {}
        self.places = self._made.places
        with self._graph.as_default():
            for name in decided.cuts:
                self._create(original.variables[name], name)
        self._add(original)
        self.program = Program(
            self._graph, self._variables(original), is_split=original.is_split
        )

    def extend(self, original: Program) -> None:
        """Adds what was added to the user's graph.

        Args:
            original: That graph as it is now.
        """
        self._add(original)
        variables = list(self.program.variables.values())
        self.program = Program(self._graph, variables, self.program)

    def gradients(self, gradient: Gradient) -> list[Gradient]:
        """Returns the gradients of the parts, or the one that there is.

        Args:
            gradient: One of the user's graph.
        """
        own = self._markers.made.get(gradient.ops[0])
        if own is not None:
            return own
        ops = tuple(self.places[op] for op in gradient.ops)
        return [Gradient(gradient.variable, ops)]

    def value_of(self, write: tf.Operation) -> tuple[tf.Operation, int]:
        """Returns the op, and which of its inputs, that is given what is written.

        Args:
            write: One of the user's graph.
        """
        passes = self._made.values.get(write)
        return (self.places[write], 1) if passes is None else (passes, 0)

    def _add(self, original: Program) -> None:
        _tf.copy_functions(original.graph, self._graph)
        for op in original.ops:
            if op.type in ("VarHandleOp", "Identity"):
                variable = original.variable_behind(op.outputs[0])
                if variable is not None and variable.op.name in self._parts:
                    self._made.divide(op.outputs[0], self._parts[variable.op.name])
        self._made.add(original.ops, self._markers.has)

    def _divide(self, made: Rewriter, op: tf.Operation) -> tf.Operation | None:
        if self._markers.has(op):
            return self._markers.divide(made, op)
        return part_ops.divide(made, op)

    def _create(self, variable: Any, name: str) -> None:
        """Creates the handles of a variable's parts."""
        cut = self._cuts[name]
        own = []
        for k, part in enumerate(cut.names):
            with tf.name_scope(""):
                handle = tf.raw_ops.VarHandleOp(
                    container="",
                    shared_name=part,
                    dtype=variable.dtype,
                    shape=cut.shape_of(k),
                    name=part,
                )
            _tf.copy_line(variable.op, handle.op)
            own.append(handle)
        self._parts[name] = Handles(cut, tuple(own))

    def _variables(self, original: Program) -> list[Known]:
        """Returns the variables of the graph, in the order of the user's."""
        made = []
        for name, own in original.variables.items():
            facts = own.dtype, own.trainable, own.aggregation
            initializer = self.places[own.initializer]
            if name not in self._parts:
                op = self.places[own.op]
                made.append(Known(op, initializer, own.shape, *facts))
                continue
            cut = self._cuts[name]
            for k, handle in enumerate(self._parts[name].parts):
                (assign,) = (
                    one
                    for one in initializer.control_inputs
                    if any(tensor is handle for tensor in one.inputs)
                )
                shape = tf.TensorShape(cut.shape_of(k))
                made.append(Known(handle.op, assign, shape, *facts))
        return made
