# SPDX-License-Identifier: Apache-2.0
"""Graphs with variables in parts, beside the graphs that they are made of."""

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
    """A graph, and the one with variable w in parts.

    Attributes:
        program: The graph.
        divided: The other one.
        fetches: What was built.
    """

    program: Program
    divided: Divided
    fetches: Any

    def divided_value(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns what a tensor is in the graph with parts."""
        return self.divided.places[tensor.op].outputs[tensor.value_index]

    def run(self, in_parts: bool, feed: dict[Any, Any] | None = None) -> Any:
        """Returns what is fetched, by plain TensorFlow, after variables were made."""
        program = self.divided.program if in_parts else self.program
        flat = tf.nest.flatten(self.fetches)
        given = {key.op: value for key, value in (feed or {}).items()}
        if in_parts:
            flat = [
                self.divided.places[one]
                if isinstance(one, tf.Operation)
                else self.divided_value(one)
                for one in flat
            ]
            given = {self.divided.places[op]: value for op, value in given.items()}
        with v1.Session(graph=program.graph) as session:
            session.run([one.initializer for one in program.variables.values()])
            return [
                session.run(one, {op.outputs[0]: value for op, value in given.items()})
                for one in flat
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
    """Returns what is built of a variable w, and the same with w in parts.

    Args:
        build: Returns what is fetched, given the variable.
        cut: How w is divided.
        whole: Returns what writes values that are not to be divided before.
        slots: The names of the variables that are built, divided as w is.
    """
    made: list[Any] = []
    with tf.Graph().as_default() as graph:
        create = marked.creator(made)
        with tf.variable_creator_scope(create):
            w = tf.Variable(W, name="w")
            fetches = build(w)
        program = Program(graph, made)
        cuts = {"w": cut, **{slot: _of_slot(cut, slot) for slot in slots}}
        decided = Decided({}, cuts, dict.fromkeys(slots, "w"))
        return Made(program, Divided(program, decided, whole(fetches)), fetches)


def _of_slot(cut: Cut, slot: str) -> Cut:
    names = tuple(f"{slot}/part_{k}" for k in range(len(cut.names)))
    return dataclasses.replace(cut, names=names)


def check(made: Made, feed: dict[Any, Any] | None = None) -> None:
    """Raises unless the graph with parts computes what the other one does."""
    found, expected = (made.run(in_parts, feed) for in_parts in (True, False))
    for one, two in zip(found, expected, strict=True):
        if two is not None:
            np.testing.assert_allclose(one, two, rtol=1e-6)
