# SPDX-License-Identifier: Apache-2.0
"""Finds which ops are needed, and what loops need to carry.

Much of what one device computes only finds numbers that a plan knows: the shapes that
gradients are summed to, and the lists in which loops keep these for their gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import tensorflow as tf

from replicator.forms.propagate import GraphPlan, has_effect
from replicator.forms.rule import UNUSED, OpPlan


def mark(plan: GraphPlan, targets: Iterable[tf.Tensor | tf.Operation]) -> None:
    """Finds what is needed of a graph, and of functions that its ops call.

    Args:
        plan: The plan of the graph, which is told.
        targets: Tensors that are read, and ops that have to run.
    """
    needed = [*targets]
    tensors = [one for one in needed if tf.is_tensor(one)]
    _mark(plan, tensors, [one for one in needed if isinstance(one, tf.Operation)])


def _mark(
    plan: GraphPlan, outputs: Iterable[tf.Tensor], needed: Iterable[tf.Operation] = ()
) -> set[int]:
    """Marks what some outputs, and effects, need; returns which inputs they read."""
    read, plan.needed = {t.ref() for t in outputs}, {*needed}
    for op in reversed(list(plan.plans)):
        is_read = any(out.ref() in read for out in op.outputs)
        if not (is_read or has_effect(op) or op in plan.needed):
            continue
        plan.needed |= {op, *op.control_inputs, *plan.after.get(op, ())}
        its = plan.plans[op]
        inputs = [op.inputs[k] for k in _read_by(op, its, read)]
        read |= {t.ref() for t in [*inputs, *its.reads]}
    return {k for k, t in enumerate(plan.inputs) if t.ref() in read}


def _read_by(op: tf.Operation, its: OpPlan, read: Collection[Any]) -> Sequence[int]:
    """Returns which inputs an op reads, given what is read of its outputs."""
    if not its.bodies:
        return [k for k, need in enumerate(its.needs) if need is not UNUSED]
    if op.type not in ("While", "StatelessWhile"):
        for body in its.bodies:
            _mark(body, body.outputs)
        return range(len(op.inputs))
    test, body = its.bodies
    carried = {k for k, out in enumerate(op.outputs) if out.ref() in read}
    while True:
        inner = _mark(test, test.outputs)
        inner |= _mark(body, [body.outputs[k] for k in sorted(carried)])
        if inner <= carried:
            body.carried = carried
            return sorted(carried)
        carried |= inner
