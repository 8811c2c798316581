# SPDX-License-Identifier: Apache-2.0
"""Rewrites a single-device graph into another one in which variables are partitioned.

Replicas copy the new graph; the user's ops are mapped to its ops. Each part is a
variable of its own, so later code need not know that it is a part.

Source: the partitioner of AutoDist (Zhang et al. 2020), which also transforms a
single-device graph before replicating it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist import part_ops
from replicator.autodist.cuts import Decided
from replicator.autodist.gradient_calls import Gradient
from replicator.autodist.part_markers import Markers
from replicator.autodist.program import Program
from replicator.autodist.rewriting import Handles, Rewriter


@dataclasses.dataclass(frozen=True)
class Known:
    """A variable of the new graph: a part of one of the user's, or a whole one.

    Attributes:
        op: The op that makes its handle.
        initializer: The op that initializes it.
        shape: Its shape.
        dtype: Its dtype.
        trainable: Whether optimizers update it.
        aggregation: The aggregation of the user's variable.
    """

    op: tf.Operation
    initializer: tf.Operation
    shape: tf.TensorShape
    dtype: tf.DType
    trainable: bool
    aggregation: Any


class Divided:
    """A single-device graph with partitioned variables.

    Args:
        original: The user's graph.
        decided: How its variables are partitioned.
        whole: Writes whose values must stay whole until they are written.

    Attributes:
        program: The Program of the new graph.
        places: Maps the user's ops to those of the new graph.
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
        """Adds ops that the user's graph has gained.

        Args:
            original: The user's graph as it is now.
        """
        self._add(original)
        variables = list(self.program.variables.values())
        self.program = Program(self._graph, variables, self.program)

    def gradients(self, gradient: Gradient) -> list[Gradient]:
        """Returns the gradients of a variable's parts, or of the whole variable.

        Args:
            gradient: A gradient of the user's graph.
        """
        part_gradients = self._markers.made.get(gradient.ops[0])
        if part_gradients is not None:
            return part_gradients
        ops = tuple(self.places[op] for op in gradient.ops)
        return [Gradient(gradient.variable, ops)]

    def value_of(self, write: tf.Operation) -> tuple[tf.Operation, int]:
        """Returns the op that is given a written value, and the index of that input.

        Args:
            write: An op of the user's graph.
        """
        value_op = self._made.values.get(write)
        return (self.places[write], 1) if value_op is None else (value_op, 0)

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
        handles = []
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
            handles.append(handle)
        self._parts[name] = Handles(cut, tuple(handles))

    def _variables(self, original: Program) -> list[Known]:
        """Returns the variables of the new graph, in the order of the user's."""
        variables = []
        for name, whole in original.variables.items():
            facts = whole.dtype, whole.trainable, whole.aggregation
            initializer = self.places[whole.initializer]
            if name not in self._parts:
                op = self.places[whole.op]
                variables.append(Known(op, initializer, whole.shape, *facts))
                continue
            cut = self._cuts[name]
            for k, handle in enumerate(self._parts[name].parts):
                (assign,) = (
                    source
                    for source in initializer.control_inputs
                    if any(tensor is handle for tensor in source.inputs)
                )
                shape = tf.TensorShape(cut.shape_of(k))
                variables.append(Known(handle.op, assign, shape, *facts))
        return variables
