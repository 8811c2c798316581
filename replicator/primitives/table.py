# SPDX-License-Identifier: Apache-2.0
"""The table of all primitives: one line each.

WORKSPACE.md says what else a new primitive needs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from replicator.graph.ir import placeholder
from replicator.graph.lowering.matched import Lowering
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
    """A primitive's lowering, its dual and the facts that passes ask for.

    Attributes:
        lower: Builds its real ops.
        gradient: Its dual.
        facts: What passes need to know about it.
    """

    lower: Lowering
    gradient: placeholder.Gradient
    facts: placeholder.PrimitiveFacts


def _from_module(module: Any) -> Primitive:
    """Returns the primitive that a module of this package defines."""
    return Primitive(module.lower, module.gradient, module.FACTS)


PRIMITIVES = {
    "all_gather": _from_module(all_gather),
    "all_reduce": _from_module(all_reduce),
    "all_to_all": _from_module(all_to_all),
    "barrier": _from_module(barrier),
    "broadcast": _from_module(broadcast),
    "gather": _from_module(gather),
    "permute": _from_module(permute),
    "recv": Primitive(message.lower, message.recv_gradient, message.RECV),
    "reduce": _from_module(reduce),
    "reduce_scatter": _from_module(reduce_scatter),
    "scatter": _from_module(scatter),
    "send": Primitive(message.lower, message.send_gradient, message.SEND),
}

LOWERINGS = {name: primitive.lower for name, primitive in PRIMITIVES.items()}
GRADIENTS = {name: primitive.gradient for name, primitive in PRIMITIVES.items()}
FACTS = {name: primitive.facts for name, primitive in PRIMITIVES.items()}
DEFAULT_ALGORITHMS = {name: facts.algorithm for name, facts in FACTS.items()}


@tf.RegisterGradient(placeholder.GRADIENT_TYPE)
def _gradient(op: tf.Operation, *upstream: Any) -> list[tf.Tensor | None]:
    """The gradient for tf.gradients; tapes use what `base.communicate` records."""
    call = placeholder.read(op)
    assert call is not None, "only placeholders carry this gradient type"
    if call.conditional:
        return [None] * len(op.inputs)
    placed = placeholder.Placeholder(op, call)
    return base.differentiate(PRIMITIVES[call.primitive].gradient, placed, upstream)
