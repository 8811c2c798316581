# SPDX-License-Identifier: Apache-2.0
"""Refuses tensors of other replicas, or from before the step, in a call of step_fn.

A tensor that outlives the call that made it, in an attribute, a `cached_property` or a
list, belongs to one replica: it holds that replica's values, and no gradient of the
others passes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import tensorflow as tf

from replicator import context, errors
from replicator._tf import tapes
from replicator.graph.ir import placeholder
from replicator.graph.same.keys import OWN, Keys
from replicator.variables.creation import VariableFactory


def check_uses(
    replicas: Sequence[Sequence[tf.Operation]],
    elements: Sequence[Iterable[tf.Tensor]],
    build: context.Build,
) -> None:
    """Raises ContextError if a replica computes with another replica's tensors.

    Constants and results like all_reduce's, and what is computed from them alone, are
    the same on all replicas: keeping these does no harm. Handles of resources
    are not values; `checks.check_components` looks at those of variables. What is read
    from a variable is the same, too, but has no gradient on the other replicas.

    Args:
        replicas: The ops of each replica that is compared, in build order, not rewired.
        elements: The tensors that only one replica is given, for each.
        build: The build.
    """
    home = {op: n for n, ops in enumerate(replicas) for op in ops}
    owner_of_element = {
        id(tensor): n for n, tensors in enumerate(elements) for tensor in tensors
    }
    keys = Keys()
    for op in home:
        if op.type == "Placeholder" and placeholder.read(op) is None:
            # It stands for a tensor from outside the step, which no replica has made.
            keys.set(op.outputs[0], keys.new())
    for op, n in home.items():
        for tensor in op.inputs:
            owner = owner_of_element.get(id(tensor), home.get(tensor.op, n))
            if owner == n or tensor.dtype == tf.resource:
                continue
            if keys.of(tensor).open & OWN:
                user, other = build.compared[n], build.compared[owner]
                _refuse(user, op, other, tensor, id(tensor) in owner_of_element)


def _refuse(
    user: int, op: tf.Operation, owner: int, tensor: tf.Tensor, is_given: bool
) -> NoReturn:
    raise errors.ContextError(
        f"replica {user} uses a tensor that belongs to replica {owner} "
        f"({tensor.name}).",
        [
            "the tensor is an input or argument of step_fn"
            if is_given
            else f"the tensor is created at {errors.line_of(tensor.op)}",
            f"and used at {errors.line_of(op)} ({op.type})",
        ],
        "do not keep tensors from one call of step_fn for the next, in attributes, "
        "caches or lists: compute them in each call, or send them with broadcast. A "
        "layer that keeps tensors (Keras' Normalization) is to be built before the "
        "step: call it once, or its build(...).",
    )


def check_gradients(
    factory: VariableFactory,
    replicas: Sequence[Sequence[tf.Operation]],
    ops_before_step: Iterable[tf.Operation],
    build: context.Build,
) -> None:
    """Raises ContextError if one replica's gradients go back beyond the step.

    tf.gradients does. There, one replica's component of a variable is in use, so only
    that replica's gradient has this part of the derivative.

    Args:
        factory: Creates the variables.
        replicas: The ops of each replica that is compared, in build order, not rewired.
        ops_before_step: The ops in the graph before the step.
        build: The build.
    """
    before_step = set(ops_before_step)
    differentiations: list[dict[tf.Operation, tf.Operation]] = [{} for _ in replicas]
    for ops, by_forward in zip(replicas, differentiations, strict=True):
        for op in ops:
            forward = tapes.differentiated_by(op)
            if forward is not None and forward in before_step:
                by_forward.setdefault(forward, op)
    variables = {**factory.owners(), **build.aliases.recorded()}
    for replica_id, by_forward in zip(build.compared, differentiations, strict=True):
        for forward, op in by_forward.items():
            if all(forward in other for other in differentiations):
                continue
            if not _depends_on(forward, lambda tensor: id(tensor) in variables):
                continue
            raise errors.ContextError(
                f"only replica {replica_id} differentiates what was computed from a "
                f"variable before the step ({forward.name}); the gradients of the "
                "others lack that part.",
                [
                    f"it is computed at {errors.line_of(forward)}",
                    f"and differentiated at {errors.line_of(op)} ({op.type})",
                ],
                "compute it in step_fn, from the variable itself; or pass it through "
                "tf.stop_gradient, if it is not to be trained.",
            )


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
