"""The table of all primitives: one line each.

A new primitive is a file beside this one, a line here, and a method of Replicator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from replicator.graph import placeholder
from replicator.graph.rewrite import Lowering
from replicator.primitives import (
    all_gather,
    all_reduce,
    base,
    broadcast,
    reduce_scatter,
)


@dataclasses.dataclass(frozen=True)
class Primitive:
    """How a primitive becomes real ops, and what its dual is."""

    lower: Lowering
    gradient: base.Gradient


PRIMITIVES = {
    "all_gather": Primitive(all_gather.lower, all_gather.gradient),
    "all_reduce": Primitive(all_reduce.lower, all_reduce.gradient),
    "broadcast": Primitive(broadcast.lower, broadcast.gradient),
    "reduce_scatter": Primitive(reduce_scatter.lower, reduce_scatter.gradient),
}

LOWERINGS = {name: primitive.lower for name, primitive in PRIMITIVES.items()}


@tf.RegisterGradient(placeholder.GRADIENT_TYPE)
def _gradient(op: tf.Operation, *upstream: Any) -> list[tf.Tensor | None]:
    """tf.gradients asks here; tapes ask what `base.communicate` recorded."""
    call = placeholder.read(op)
    assert call is not None, "only placeholders carry this gradient type"
    if call.options.get("when"):
        return [None] * len(op.inputs)
    placed = placeholder.Placeholder(op, call)
    return base.differentiate(PRIMITIVES[call.primitive].gradient, placed, upstream)
