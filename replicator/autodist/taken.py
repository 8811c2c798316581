# SPDX-License-Identifier: Apache-2.0
"""Which gradients of variables a single-device graph takes, and of what."""

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
        ops: Its marker; two of them, of values and indices, if it is sparse.
    """

    variable: str
    ops: tuple[tf.Operation, ...]


def begun_by_tapes(markers: Sequence[tf.Operation]) -> dict[str, tf.Operation]:
    """Returns what tapes start from, with a gradient that they took from there."""
    found: dict[str, tf.Operation] = {}
    for op in markers:
        for name in (marked.text(op, marked.BEGUN) or "").split(","):
            if name:
                found.setdefault(name, op)
    return found


def grouped(markers: Sequence[tf.Operation]) -> list[list[Gradient]]:
    """Returns the gradients that one call of tf.gradients takes, each with the others.

    None of them depends on another: what they lead to are handles.
    """
    groups: dict[object, list[Gradient]] = {}
    waiting = None
    for op in markers:
        if marked.text(op, marked.PART) == "values":
            waiting = op
            continue
        ops = (op,) if waiting is None else (waiting, op)
        waiting = None
        name = marked.text(op, marked.GRADIENT)
        assert name is not None, "it is a marker"
        # Others depend on those that lead through a gradient, to another one.
        alone = marked.text(op, marked.BACK)
        key = op if alone else marked.text(op, marked.TAKEN) or op
        groups.setdefault(key, []).append(Gradient(name, ops))
    return list(groups.values())


def differentiated(graph: tf.Graph, start: tf.Operation) -> tf.Tensor | None:
    """Returns what is differentiated from a start on, by the names of gradients."""
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
