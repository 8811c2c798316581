# SPDX-License-Identifier: Apache-2.0
"""What is computed of the whole batch, for what follows from it to be a mean or a sum.

A sum over a replica's examples that is divided by how many of them are positive, or an
example less the mean of all: nothing that is done to what comes of these makes it what
it is on one device, as one replica may have to divide by zero. But nothing has to be
trained through such a divisor or mean, so it is put together before it is used.
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
    """An operand that has to be that of the whole batch.

    Attributes:
        op: What is given it.
        index: At which place.
        power: By which power of a replica's share of the examples it is multiplied
            then, so that a sum that is divided by it becomes a mean.
    """

    op: tf.Operation
    index: int
    power: float = 0

    @property
    def tensor(self) -> tf.Tensor:
        """What a replica has in its place."""
        return self.op.inputs[self.index]


def may_be(op: tf.Operation, index: int, control: switching.Flow) -> bool:
    """Whether an operand may be put together before it is used."""
    tensor = op.inputs[index]
    if not tensor.dtype.is_floating or not tensor.shape.is_fully_defined():
        return False
    if op in control or tensor.op in control:
        return False
    return not {op.type, tensor.op.type} & SWITCHING and not _has_own_gradient(op)


def is_closed(op: tf.Operation, index: int, one: Whole) -> bool:
    """Whether a result of an IdentityN was made of an operand within its own gradient.

    What a `tf.custom_gradient` computes of it, or of what it is made of, is not known.

    Args:
        op: What ends a function with a gradient of its own, or another IdentityN.
        index: Of the result.
        one: The operand.
    """
    if not _has_own_gradient(op):
        return False
    given = {t.op for t in op.inputs if t.op.type == "Identity"}
    given.discard(op.inputs[index].op)
    return one.op in flows.upstream([op.inputs[index]], lambda before: before in given)


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
        new = [one.op for one in op.inputs if one.op not in seen]
        seen.update(new)
        stack += new
    return False


def by_tensor(wholes: Iterable[Whole]) -> dict[object, list[Whole]] | None:
    """Returns operands that are one tensor together, by the references to these.

    In an order that is the same on all replicas, which tell one another of them. None
    if one tensor would have to be several.
    """
    found: dict[object, list[Whole]] = {}
    for one in sorted(wholes, key=lambda one: (one.op.name, one.index)):
        found.setdefault(one.tensor.ref(), []).append(one)
    if any(len({one.power for one in several}) > 1 for several in found.values()):
        return None
    return found


def uses(tensor: tf.Tensor) -> list[tuple[tf.Operation, int]]:
    """Returns which ops are given a tensor, and at which places, for its value."""
    return [
        (consumer, k)
        for consumer in dict.fromkeys(tensor.consumers())
        if consumer.type not in flows.SHAPES
        for k, one in enumerate(consumer.inputs)
        if one is tensor
    ]


def in_gradients(
    tensor: tf.Tensor,
    starts: Collection[tf.Operation],
    given: tf.Tensor | None = None,
) -> list[tuple[tf.Operation, int]]:
    """Returns where gradients use a tensor: behind what differentiation starts from.

    Or in what goes into that and was made later than the start, as what tells where an
    example was clipped.

    Args:
        tensor: The tensor.
        starts: From where differentiation starts.
        given: What is in its place, if that is made of it in this graph.
    """
    every = tensor.graph.get_operations()
    first = next((k for k, op in enumerate(every) if op in starts), len(every))
    later, behind = set(every[first:]), _downstream(starts)
    if given is not None:
        later -= set(flows.upstream([given], lambda op: False))
    return [
        (op, k)
        for op, k in uses(tensor)
        if op in behind or (op in later and not behind.isdisjoint(_downstream([op])))
    ]


def _downstream(ops: Iterable[tf.Operation]) -> set[tf.Operation]:
    found = set(ops)
    stack = list(found)
    while stack:
        new = {c for t in stack.pop().outputs for c in t.consumers()} - found
        found |= new
        stack += new
    return found


def between(
    tensor: tf.Tensor, behind: Collection[tf.Operation]
) -> list[tuple[tf.Operation, int]]:
    """Returns where a tensor is used for what is given to some ops."""
    inputs = [one for op in behind for one in op.inputs]
    before = set(flows.upstream(inputs, lambda op: False))
    return [(op, k) for op, k in uses(tensor) if op in before]


def put(tensor: tf.Tensor, uses: Iterable[tuple[tf.Operation, int]]) -> None:
    """Puts a tensor in the places of others."""
    for op, k in uses:
        _tf.set_input(op, k, tensor)


def scaled(whole: tf.Tensor, power: float, share: tf.Tensor) -> tf.Tensor:
    """Returns what is put in the place of a replica's own value.

    Args:
        whole: That of all examples.
        power: By which power of the replica's share it is multiplied.
        share: That share; a replica without examples counts for nothing in any case.
    """
    if not power:
        return whole
    part = tf.where(share > 0, share, tf.ones_like(share))
    return whole * tf.cast(tf.pow(part, power), whole.dtype)
