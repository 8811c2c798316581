# SPDX-License-Identifier: Apache-2.0
"""Finds tensors of other replicas that a call of step_fn uses.

A tensor that outlives the call that made it, in an attribute, a `cached_property` or a
list, belongs to one replica: it holds that replica's values, and no gradient of the
others passes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf

from replicator._tf import tapes
from replicator.graph.ir import placeholder
from replicator.graph.same.keys import OWN, Keys


def foreign_use(
    replicas: Sequence[Sequence[tf.Operation]], elements: Sequence[Iterable[tf.Tensor]]
) -> tuple[int, tf.Operation, int, tf.Tensor] | None:
    """Finds a tensor of one replica that another one uses directly.

    Constants and results like all_reduce's, and what is computed from them alone, are
    the same on all replicas: keeping these does no harm. Handles of resources
    are not values; `checks.check_components` looks at those of variables. What is read
    from a variable is the same, too, but has no gradient on the other replicas.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order, not rewired.
        elements: `elements[r]` are the tensors that only replica r is given.

    Returns:
        (the replica that uses the tensor, with this op, the replica that has it, the
        tensor), or None.
    """
    home = {op: r for r, ops in enumerate(replicas) for op in ops}
    owner_of_element = {
        id(tensor): r for r, tensors in enumerate(elements) for tensor in tensors
    }
    keys = Keys()
    for op in home:
        if op.type == "Placeholder" and placeholder.read(op) is None:
            # It stands for a tensor from outside the step, which no replica has made.
            keys.set(op.outputs[0], keys.new())
    for r, ops in enumerate(replicas):
        for op in ops:
            for tensor in op.inputs:
                owner = owner_of_element.get(id(tensor), home.get(tensor.op, r))
                if owner == r or tensor.dtype == tf.resource:
                    continue
                if keys.of(tensor).open & OWN:
                    return r, op, owner, tensor
    return None


def differentiated(
    replicas: Sequence[Sequence[tf.Operation]],
    ops_before_step: Iterable[tf.Operation],
    is_variable: Callable[[tf.Tensor], bool],
) -> tuple[int, tf.Operation, tf.Operation] | None:
    """Finds an op before the step that some replicas differentiate and others do not.

    tf.gradients goes back beyond the step. There, one replica's component of a variable
    is in use, so only that replica's gradient has this part of the derivative.

    Args:
        replicas: `replicas[r]` are the ops of replica r, in build order, not rewired.
        ops_before_step: The ops in the graph before the step.
        is_variable: Whether a tensor is the handle of a replicated variable.

    Returns:
        (a replica that differentiates it, with this op, the op before the step), or
        None.
    """
    before_step = set(ops_before_step)
    differentiations: list[dict[tf.Operation, tf.Operation]] = [{} for _ in replicas]
    for r, ops in enumerate(replicas):
        for op in ops:
            forward = tapes.differentiated_by(op)
            if forward is not None and forward in before_step:
                differentiations[r].setdefault(forward, op)
    for r, by_forward in enumerate(differentiations):
        for forward, op in by_forward.items():
            on_all = all(forward in other for other in differentiations)
            if not on_all and _depends_on(forward, is_variable):
                return r, op, forward
    return None


def _depends_on(op: tf.Operation, is_origin: Callable[[tf.Tensor], bool]) -> bool:
    """Whether one of the tensors from which an op is computed is an origin."""
    todo, seen = [op], {op}
    while todo:
        inputs = todo.pop().inputs
        if any(map(is_origin, inputs)):
            return True
        fresh = {tensor.op for tensor in inputs} - seen
        seen |= fresh
        todo += fresh
    return False
