# SPDX-License-Identifier: Apache-2.0
"""The scope of AutoDist in which a program for one device is built in a tf.Graph."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.autodist import program, variables


class Scope:
    """A single-device program in a tf.Graph.

    Args:
        graph: The graph.

    Attributes:
        variables: The variables created in it, in order.
        has_session: Whether a distributed session was created.
    """

    def __init__(self, graph: tf.Graph) -> None:
        self.graph, self.has_session = graph, False
        self.variables: list[variables.PlainVariable] = []

    def warn(self) -> None:
        """Warns if the program has not asked for a distributed session."""
        if not self.variables or self.has_session:
            return
        text = errors.compose(
            "a scope ends in which variables were created, but no distributed session: "
            "if the program has run, then on one device only.",
            [f"the first variable at {errors.line_of(self.variables[0].op)}"],
            "in place of tf.compat.v1.Session(), call "
            "autodist.create_distributed_session(); in place of "
            "MonitoredTrainingSession(...) or a Supervisor, "
            "MonitoredSession(autodist.session_creator(), hooks).",
        )
        logging.warning("%s", text)

    def initialize(self, session: Any, done: Container[tf.Operation]) -> None:
        """Runs initializers that need no feed: of variables but those done, first."""
        keys = tf.compat.v1.GraphKeys
        first = [v.initializer for v in self.variables if v.op not in done]
        then = self.graph.get_collection(keys.TABLE_INITIALIZERS)
        for ops in (first, [*then, *_started(self.graph)]):
            ready = [op for op in ops if not _is_fed(op)]
            if ready:
                session.run(ready)


def _started(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the ops that start iterators, of iterators with a single dataset."""
    ops_by_iterator: dict[tf.Operation, list[tf.Operation]] = {}
    for op in graph.get_operations():
        if op.type == "MakeIterator":
            ops_by_iterator.setdefault(op.inputs[1].op, []).append(op)
    return [ops[0] for ops in ops_by_iterator.values() if len(ops) == 1]


def _is_fed(op: tf.Operation) -> bool:
    """Whether an op needs a placeholder."""
    return any(one.type == "Placeholder" for one in program.needed([op], []).ops)
