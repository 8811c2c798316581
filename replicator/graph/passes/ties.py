"""Takes out of a step what tied variables in parts to their handles, for gradients.

A variable in parts is read by reading these. What is read is tied to the variable's
handle by an op whose gradient goes to the handle; see variables/joining.py. Once all
replicas are built, no gradient is taken any more: a tie gives way to what it ties. Where
rows are gathered of parts that were joined, as Keras' layers do, each part gathers its
own, and only rows are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf

GRADIENT_TYPE = "ReplicatorParts"
_ATTRIBUTE = "_gradient_op_type"


def is_tie(op: tf.Operation) -> bool:
    """Whether an op ties what is read of a variable in parts to its handle."""
    if op.type != "IdentityN":
        return False
    try:
        return bool(op.get_attr(_ATTRIBUTE) == GRADIENT_TYPE.encode())
    except ValueError:
        return False


def resolve(
    replicas: Sequence[Sequence[tf.Operation]],
) -> list[list[tf.Operation]]:
    """Takes the ties out of a step.

    Args:
        replicas: `replicas[r]` are the ops of replica r's sub-graph, in build order.

    Returns:
        The ops of each replica, without ties.
    """
    return [_resolve(ops) for ops in replicas]


def _resolve(ops: Sequence[tf.Operation]) -> list[tf.Operation]:
    ties = [op for op in ops if is_tie(op)]
    if not ties:
        return list(ops)
    for tie in ties:
        _tf.replace(tie.outputs[0], tie.inputs[0])
        _tf.move_control_outputs(tie, tie.inputs[0].op)
    _tf.abandon(ties)
    gone = set(ties)
    made: list[tf.Operation] = []
    for op in ops:
        if op in gone:
            continue
        made.append(op)
    return made


def value_of(tie: Any) -> tf.Tensor:
    """Returns what a tie ties."""
    return tie.inputs[0]
