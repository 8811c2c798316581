# SPDX-License-Identifier: Apache-2.0
"""Graphs with partitioned variables, beside the graphs that they are derived from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator.autodist import marked
from replicator.autodist.cuts import Cut, Decided
from replicator.autodist.divided import Divided
from replicator.autodist.program import Program

v1 = tf.compat.v1
ROWS = Cut(0, (1, 3), (4, 2), ("w/part_0", "w/part_1"))
COLUMNS = Cut(1, (1, 1), (4, 2), ("w/part_0", "w/part_1"))
CUTS = {"rows": ROWS, "columns": COLUMNS}
W = np.arange(8, dtype=np.float32).reshape(4, 2) / 10 + 0.1


@dataclasses.dataclass(frozen=True)
class Made:
    """A graph, and its counterpart with variable w in parts.

    Attributes:
        program: The graph.
        divided: The counterpart.
        fetches: The results.
    """

    program: Program
    divided: Divided
    fetches: Any

    def divided_value(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor's counterpart in the graph with parts."""
        return self.divided.places[tensor.op].outputs[tensor.value_index]

    def run(self, in_parts: bool, feed: dict[Any, Any] | None = None) -> Any:
        """Returns the fetches, by plain TensorFlow, after initializing variables."""
        program = self.divided.program if in_parts else self.program
        flat = tf.nest.flatten(self.fetches)
        feeds = {key.op: value for key, value in (feed or {}).items()}
        if in_parts:
            flat = [
                self.divided.places[tensor]
                if isinstance(tensor, tf.Operation)
                else self.divided_value(tensor)
                for tensor in flat
            ]
            feeds = {self.divided.places[op]: value for op, value in feeds.items()}
        with v1.Session(graph=program.graph) as session:
            session.run([tensor.initializer for tensor in program.variables.values()])
            return [
                session.run(
                    tensor, {op.outputs[0]: value for op, value in feeds.items()}
                )
                for tensor in flat
            ]

    def types(self) -> list[str]:
        """Returns the types of the ops of the graph with parts."""
        return [op.type for op in self.divided.program.graph.get_operations()]


def divide(
    build: Callable[[Any], Any],
    cut: Cut = ROWS,
    whole: Callable[[Any], Sequence[tf.Operation]] = lambda fetches: (),
    slots: Sequence[str] = (),
) -> Made:
    """Returns a graph with a variable w, and the same with w in parts.

    Args:
        build: Returns the fetches, given the variable.
        cut: How w is divided.
        whole: Returns earlier ops that write values which must not be divided.
        slots: The names of the variables that `build` creates, divided as w is.
    """
    variables: list[Any] = []
    with tf.Graph().as_default() as graph:
        create = marked.creator(variables)
        with tf.variable_creator_scope(create):
            w = tf.Variable(W, name="w")
            fetches = build(w)
        program = Program(graph, variables)
        cuts = {"w": cut, **{slot: _of_slot(cut, slot) for slot in slots}}
        decided = Decided({}, cuts, dict.fromkeys(slots, "w"))
        return Made(program, Divided(program, decided, whole(fetches)), fetches)


def _of_slot(cut: Cut, slot: str) -> Cut:
    names = tuple(f"{slot}/part_{k}" for k in range(len(cut.names)))
    return dataclasses.replace(cut, names=names)


def check(made: Made, feed: dict[Any, Any] | None = None) -> None:
    """Raises unless the graph with parts computes the same as the other one."""
    actual, expected = (made.run(in_parts, feed) for in_parts in (True, False))
    for actual_value, expected_value in zip(actual, expected, strict=True):
        if expected_value is not None:
            np.testing.assert_allclose(actual_value, expected_value, rtol=1e-6)
