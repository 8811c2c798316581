# SPDX-License-Identifier: Apache-2.0
"""What the primitives with a root share: broadcast, scatter, reduce and gather.

Where only the root hands something in, the other replicas say what is to come: by a
tf.TensorSpec, or by a tensor like it, whose value is not used. Gradients flow where the
tape watches something on every replica, so that every replica takes part in them:
operands behind those that are communicated are only there to put a call on the tape,
and a receipt stands for what a replica handed to the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering.matched import Matched
from replicator.primitives import arithmetic, base, flows


def is_root(root: int) -> bool:
    """Whether the replica being built is the root."""
    return context.require("a root").replica_id == root


def check_dense(what: str, leaves: Sequence[Any], verb: str) -> None:
    """Raises ArgumentError if a leaf is sparse.

    Args:
        what: The primitive.
        leaves: What `base.flatten` returned.
        verb: What the primitive does, e.g. "send".
    """
    if any(isinstance(leaf, tf.IndexedSlices) for leaf in leaves):
        raise base.bad_argument(
            what, f"cannot {verb} IndexedSlices", f"{what} its values and indices."
        )


def handed_in(
    what: str, value: Any, root: int
) -> tuple[list[tf.Tensor], list[tf.Tensor | tf.TensorSpec]]:
    """Reads the argument of a primitive to which only the root's value matters.

    Args:
        what: The primitive, for messages.
        value: On the root a nest of tensors; elsewhere that, or a nest of TensorSpecs.
        root: The root.

    Returns:
        What becomes operands, and what says dtype and shape of each leaf: the tensors,
        and no operands and the specs.

    Raises:
        ArgumentError: The root has specs, or another replica both; or a leaf is sparse.
    """
    given = tf.nest.flatten(value)
    specs = [leaf for leaf in given if isinstance(leaf, tf.TensorSpec)]
    if specs and is_root(root):
        raise base.bad_argument(
            what,
            f"was given {errors.shown(specs[0])}, but it is the root",
            "the root passes tensors; the others may pass a tf.TensorSpec.",
        )
    if specs and len(specs) < len(given):
        raise base.bad_argument(
            what,
            "was given tensors and TensorSpecs in one nest",
            "pass one or the other, or make two calls.",
        )
    if specs:
        return [], specs
    leaves = base.flatten(value, what)
    check_dense(what, leaves, "send")
    return leaves, leaves


def zeros(like: Sequence[tf.Tensor], tied: bool) -> list[tf.Tensor | None]:
    """Returns the gradients of operands that only put a call on the tape.

    Args:
        like: The operands.
        tied: Whether the communication made last gave a receipt. The zeros then
            depend on it, so that they can be differentiated wherever the root's can.
    """
    receipt = context.require("a gradient").receipts[-1] if tied else None
    return [
        None
        if not flows.is_differentiable(x)
        else tf.zeros_like(x)
        if receipt is None
        else tf.zeros_like(x) + tf.cast(receipt, x.dtype)
        for x in like
    ]


def as_agreed(matched: Matched, k: int) -> tf.Tensor:
    """Returns the root's k-th operand, compared with what the others say of it.

    Inside a lowering, on the root's device. Compares what is unknown while the step is
    built: with the specs of the other replicas, and with their tensors.
    """
    root = matched.group.index(matched.options["root"])
    value = matched.operands[root][k]
    stand_ins = [
        own[k]
        for n, own in enumerate(matched.operands)
        if n != root and k < len(own) and not own[k].shape.is_fully_defined()
    ]
    for call in matched.calls:
        if not value.shape.is_fully_defined():
            value = arithmetic.ensure_shape(value, call.agreed[k].shape)
    return same_shape(value, stand_ins, matched.calls[root].primitive)


def same_shape(value: tf.Tensor, others: Sequence[tf.Tensor], what: str) -> tf.Tensor:
    """Returns `value`, after comparing its shape with the others' when it runs."""
    alike = [
        tf.debugging.assert_equal(
            rank_and_shape(other),
            rank_and_shape(value),
            message=f"{what}: the replicas' tensors differ in shape",
        )
        for other in others
    ]
    with tf.control_dependencies([op for op in alike if op is not None]):
        return tf.identity(value)


def rank_and_shape(tensor: tf.Tensor) -> tf.Tensor:
    """Returns [rank, *shape]: shapes alone compare as equal where they broadcast."""
    return tf.concat([[tf.rank(tensor)], tf.shape(tensor)], 0)


def values(leaves: Sequence[tf.Tensor | tf.TensorSpec]) -> list[Value]:
    """Returns dtype and static shape of each leaf."""
    return [Value.of(leaf) for leaf in leaves]
