# SPDX-License-Identifier: Apache-2.0
"""Finds the gradients in a single-device graph, and the losses that they are of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from replicator.autodist import marked


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A gradient of a variable.

    Attributes:
        variable: The variable's name.
        ops: Its marker; if it is sparse, the markers of its values and indices.
    """

    variable: str
    ops: tuple[tf.Operation, ...]


def begun_by_tapes(markers: Sequence[tf.Operation]) -> dict[str, tf.Operation]:
    """Maps the name of each op that a tape starts from to a marker of a gradient."""
    markers_by_start: dict[str, tf.Operation] = {}
    for op in markers:
        for name in (marked.text(op, marked.BEGUN) or "").split(","):
            if name:
                markers_by_start.setdefault(name, op)
    return markers_by_start


def grouped(markers: Sequence[tf.Operation]) -> list[list[Gradient]]:
    """Groups the gradients that one call of tf.gradients takes; others are alone.

    Gradients in a group are independent, since each is that of a variable's handle.
    """
    groups: dict[object, list[Gradient]] = {}
    values_marker = None
    for op in markers:
        if marked.text(op, marked.PART) == "values":
            values_marker = op
            continue
        ops = (op,) if values_marker is None else (values_marker, op)
        values_marker = None
        name = marked.text(op, marked.GRADIENT)
        assert name is not None, "it is a marker"
        # A second derivative is alone, since gradients in other groups depend on it.
        back = marked.text(op, marked.BACK)
        key = op if back else marked.text(op, marked.TAKEN) or op
        groups.setdefault(key, []).append(Gradient(name, ops))
    return list(groups.values())


def differentiated(graph: tf.Graph, start: tf.Operation) -> tf.Tensor | None:
    """Returns the tensor differentiated from a start, by the names of gradients."""
    scope = start.name.rpartition("grad_ys_")[0]
    for consumer in start.outputs[0].consumers():
        rest = consumer.name.removeprefix(scope)
        place = rest.find("_grad/")
        while place >= 0:
            try:
                op = graph.get_operation_by_name(rest[:place])
            except KeyError:
                place = rest.find("_grad/", place + 1)
                continue
            return op.outputs[0] if op.outputs else None
    return None
