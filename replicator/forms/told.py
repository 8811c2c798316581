# SPDX-License-Identifier: Apache-2.0
"""What users are told of a program: gathers that cost much, lines of errors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from absl import logging

from replicator import errors
from replicator.forms.forms import REPLICATED, Partial, Sharded
from replicator.forms.propagate import GraphPlan
from replicator.graph.ir import shapes

_SHARE = 0.1  # of what a step sends, which a gather may take unsaid
_FEW = 2**20  # bytes, of which nothing is said either
# These gather only what is shorter than their results.
_SHORTER = ("UnsortedSegmentSum", "UnsortedSegmentMax", "UnsortedSegmentMin")
_NODE = re.compile(r"node ([\w./-]+)")


def warn_of_gathers(plan: GraphPlan, rows: Sequence[int | None]) -> bool:
    """Warns of the largest gather, if it takes a large part of what a step sends.

    Args:
        plan: The plan of a function.
        rows: How many rows its inputs have now; None: it is no batch, or unknown.

    Returns:
        Whether there is one.
    """
    known = [n for n in rows if n is not None]
    sent = dict(_sent(plan, known[0])) if known else {}
    gathers = {
        (tensor, form, op): size
        for (tensor, form, op), size in sent.items()
        if isinstance(form, Sharded) and op.type not in _SHORTER
    }
    if not gathers:
        return False
    (tensor, _, op), size = max(gathers.items(), key=lambda item: item[1])
    if size < max(_FEW, _SHARE * sum(sent.values())):
        return False
    text = errors.compose(
        f"{op.type} takes the whole batch of {tensor.deref().op.type}, about "
        f"{size / 2**20:.1f} MiB: replicas gather it in each step, and each computes "
        "the same.",
        [f"at {errors.line_of(op)}"],
        "nothing, if it is meant: the values are those of one device. To be faster, "
        "compute of each row by itself, or of fewer values.",
    )
    logging.warning("%s", text)
    return True


def warn_of_statistics(ops: Sequence[tf.Operation]) -> None:
    """Warns of statistics that are not each replica's own, though that was asked for.

    Args:
        ops: What computes them.
    """
    if not ops:
        return
    lines = dict.fromkeys(f"at {errors.line_of(op)}" for op in ops)
    text = errors.compose(
        f"local_statistics=True leaves {len(ops)} statistics of batch normalization "
        "those of the whole batch: they are computed in a function, a branch or a "
        "loop, or do more than normalize rows.",
        list(lines)[:3],
        "nothing, if that is meant; else normalize outside of nested functions, and "
        "use mean and variance for nothing else.",
    )
    logging.warning("%s", text)


def _sent(plan: GraphPlan, rows: int) -> Iterator[tuple[Any, int]]:
    """Yields what replicas tell each other: tensors, forms, first users; and bytes."""
    seen: set[Any] = set()
    for op, its in plan.plans.items():
        for tensor, need in zip(op.inputs, its.needs, strict=True):
            form, key = plan.fact(tensor).form, tensor.ref()
            is_sent = need == REPLICATED and isinstance(form, Sharded | Partial)
            if is_sent and key not in seen:
                seen.add(key)
                yield (key, form, op), _bytes(tensor, rows)
        for body in its.bodies:
            yield from _sent(body, rows)


def _bytes(tensor: tf.Tensor, rows: int) -> int:
    if tensor.shape.rank is None:
        return 0
    sizes = (rows if size is None else size for size in shapes.sizes(tensor))
    return math.prod(sizes) * tensor.dtype.size


def note_lines(error: Exception, graph: Any) -> None:
    """Adds the user's lines to an error of a step that runs.

    TensorFlow knows only where the replicas' ops were built: not by the user.

    Args:
        error: The error; or one with a shorter message, raised while it was handled.
        graph: The graph of the step.
    """
    text = str(error.__context__ or error)
    found = [_line(graph, name) for name in _NODE.findall(text)]
    for line in dict.fromkeys(line for line in found if line):
        error.add_note(f"at {line}")


def _line(graph: Any, name: str) -> str:
    """Returns the line of an op, or of what calls the function that it is in."""
    while name:
        try:
            return errors.line_of(graph.get_operation_by_name(name))
        except (KeyError, ValueError):
            name = name.rpartition("/")[0]
    return ""
