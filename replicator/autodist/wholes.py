# SPDX-License-Identifier: Apache-2.0
"""Operands that must be computed from the whole batch for results to be means or sums.

Take a sum over a replica's examples divided by how many of them are positive, or an
example less the mean of all: no weight turns the replicas' results into that of one
device, as one replica may have to divide by zero. But nothing has to be trained through
such a divisor or mean, so it is combined over the replicas before it is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

import tensorflow as tf

from replicator import _tf
from replicator.autodist import flows
from replicator.graph.ir import switching
from replicator.graph.ir.kinds import SWITCHING, kind_of

STOPS = ("StopGradient", "PreventGradient")
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarHandleOp")


@dataclasses.dataclass(frozen=True)
class Whole:
    """An operand that must be that of the whole batch.

    Attributes:
        op: The op that is given it.
        index: The index of that input.
        power: The exponent of a replica's share of the examples by which it is then
            multiplied, so that a sum divided by it becomes a mean.
    """

    op: tf.Operation
    index: int
    power: float = 0

    @property
    def tensor(self) -> tf.Tensor:
        """The replica's own tensor in its place."""
        return self.op.inputs[self.index]


def may_be(op: tf.Operation, index: int, control: switching.Flow) -> bool:
    """Whether an operand may be combined over the replicas before it is used."""
    tensor = op.inputs[index]
    if not tensor.dtype.is_floating or not tensor.shape.is_fully_defined():
        return False
    if op in control or tensor.op in control:
        return False
    return not {op.type, tensor.op.type} & SWITCHING and not _has_own_gradient(op)


def is_closed(op: tf.Operation, index: int, one: Whole) -> bool:
    """Whether a custom gradient encloses the path from an operand to a result.

    What a `tf.custom_gradient` computes of the operand, or of what it depends on, is
    not known.

    Args:
        op: The IdentityN that ends a function with a custom gradient, or any other.
        index: The index of the result.
        one: The operand.
    """
    if not _has_own_gradient(op):
        return False
    argument_ops = {t.op for t in op.inputs if t.op.type == "Identity"}
    argument_ops.discard(op.inputs[index].op)
    return one.op in flows.upstream(
        [op.inputs[index]], lambda before: before in argument_ops
    )


def _has_own_gradient(op: tf.Operation) -> bool:
    try:
        return bool(op.get_attr("_gradient_op_type"))
    except ValueError:
        return False


def is_trained(tensor: tf.Tensor, stops: Collection[str] = ()) -> bool:
    """Whether a tensor depends on variables.

    Args:
        tensor: The tensor.
        stops: Types of ops behind which not to look.
    """
    seen, stack = {tensor.op}, [tensor.op]
    while stack:
        op = stack.pop()
        if op.type in _READS:
            return True
        if kind_of(op).calls and any(t.dtype == tf.resource for t in op.inputs):
            return True
        if op.type in stops:
            continue
        new_ops = [operand.op for operand in op.inputs if operand.op not in seen]
        seen.update(new_ops)
        stack += new_ops
    return False


def by_tensor(wholes: Iterable[Whole]) -> dict[object, list[Whole]] | None:
    """Groups operands by tensor reference; None if powers differ within a group.

    The order is the same on all replicas, which communicate about each group.
    """
    groups: dict[object, list[Whole]] = {}
    for operand in sorted(wholes, key=lambda one: (one.op.name, one.index)):
        groups.setdefault(operand.tensor.ref(), []).append(operand)
    if any(
        len({operand.power for operand in operands}) > 1 for operands in groups.values()
    ):
        return None
    return groups


def uses(tensor: tf.Tensor) -> list[tuple[tf.Operation, int]]:
    """Returns the ops that use a tensor's value, with the indices of the inputs."""
    return [
        (consumer, k)
        for consumer in dict.fromkeys(tensor.consumers())
        if consumer.type not in flows.SHAPES
        for k, operand in enumerate(consumer.inputs)
        if operand is tensor
    ]


def in_gradients(
    tensor: tf.Tensor,
    starts: Collection[tf.Operation],
    given: tf.Tensor | None = None,
) -> list[tuple[tf.Operation, int]]:
    """Returns the uses of a tensor by gradients: those that depend on their starts.

    Ops made after a start whose results reach such a use count, too, e.g. the test of
    which examples were clipped.

    Args:
        tensor: The tensor.
        starts: The ops that differentiation starts from.
        given: The tensor that replaces it, if this graph computes that from it.
    """
    graph_ops = tensor.graph.get_operations()
    first = next((k for k, op in enumerate(graph_ops) if op in starts), len(graph_ops))
    later, dependents = set(graph_ops[first:]), _downstream(starts)
    if given is not None:
        later -= set(flows.upstream([given], lambda op: False))
    return [
        (op, k)
        for op, k in uses(tensor)
        if op in dependents
        or (op in later and not dependents.isdisjoint(_downstream([op])))
    ]


def _downstream(ops: Iterable[tf.Operation]) -> set[tf.Operation]:
    dependents = set(ops)
    stack = list(dependents)
    while stack:
        new_ops = {c for t in stack.pop().outputs for c in t.consumers()} - dependents
        dependents |= new_ops
        stack += new_ops
    return dependents


def between(
    tensor: tf.Tensor, behind: Collection[tf.Operation]
) -> list[tuple[tf.Operation, int]]:
    """Returns the uses of a tensor that some ops depend on."""
    inputs = [operand for op in behind for operand in op.inputs]
    upstream = set(flows.upstream(inputs, lambda op: False))
    return [(op, k) for op, k in uses(tensor) if op in upstream]


def put(tensor: tf.Tensor, uses: Iterable[tuple[tf.Operation, int]]) -> None:
    """Makes a tensor the input of ops at some uses."""
    for op, k in uses:
        _tf.set_input(op, k, tensor)


def scaled(whole: tf.Tensor, power: float, share: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that replaces a replica's own operand.

    Args:
        whole: The operand of all examples.
        power: The exponent of the replica's share by which it is multiplied.
        share: That share; a replica without examples counts for nothing anyway.
    """
    if not power:
        return whole
    positive_share = tf.where(share > 0, share, tf.ones_like(share))
    return whole * tf.cast(tf.pow(positive_share, power), whole.dtype)
