"""The table of all primitives: one line each.

A new primitive is a file beside this one, a line here, and a method of Replicator.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from replicator.graph.ir import placeholder
from replicator.graph.lowering.rewrite import Lowering
from replicator.primitives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    base,
    broadcast,
    gather,
    message,
    permute,
    reduce,
    reduce_scatter,
    scatter,
)


@dataclasses.dataclass(frozen=True)
class Primitive:
    """How a primitive becomes real ops, what its dual is, and which way data takes.

    Attributes:
        lower: How it becomes real ops.
        gradient: Its dual.
        algorithm: "hub": one device does the work and hands out the result; "direct":
            each tensor goes from the replica that has it to those that need it;
            "order": nothing is sent, effects are put in order.
    """

    lower: Lowering
    gradient: placeholder.Gradient
    algorithm: str


PRIMITIVES = {
    "all_gather": Primitive(all_gather.lower, all_gather.gradient, "hub"),
    "all_reduce": Primitive(all_reduce.lower, all_reduce.gradient, "hub"),
    "all_to_all": Primitive(all_to_all.lower, all_to_all.gradient, "direct"),
    "barrier": Primitive(barrier.lower, barrier.gradient, "order"),
    "broadcast": Primitive(broadcast.lower, broadcast.gradient, "direct"),
    "gather": Primitive(gather.lower, gather.gradient, "direct"),
    "permute": Primitive(permute.lower, permute.gradient, "direct"),
    "recv": Primitive(message.lower, message.recv_gradient, "direct"),
    "reduce": Primitive(reduce.lower, reduce.gradient, "direct"),
    "reduce_scatter": Primitive(
        reduce_scatter.lower, reduce_scatter.gradient, "direct"
    ),
    "scatter": Primitive(scatter.lower, scatter.gradient, "direct"),
    "send": Primitive(message.lower, message.send_gradient, "direct"),
}

LOWERINGS = {name: primitive.lower for name, primitive in PRIMITIVES.items()}
GRADIENTS = {name: primitive.gradient for name, primitive in PRIMITIVES.items()}
ALGORITHMS = {name: primitive.algorithm for name, primitive in PRIMITIVES.items()}


@tf.RegisterGradient(placeholder.GRADIENT_TYPE)
def _gradient(op: tf.Operation, *upstream: Any) -> list[tf.Tensor | None]:
    """tf.gradients asks here; tapes ask what `base.communicate` recorded."""
    call = placeholder.read(op)
    assert call is not None, "only placeholders carry this gradient type"
    if call.options.get("when"):
        return [None] * len(op.inputs)
    placed = placeholder.Placeholder(op, call)
    return base.differentiate(PRIMITIVES[call.primitive].gradient, placed, upstream)
