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
from replicator.graph.ir import shapes
from replicator.graph.ir.placeholder import Value
from replicator.graph.lowering.matched import Matched
from replicator.primitives import base, flows, unknown_shapes


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


def as_agreed(matched: Matched, k: int, entries: int | None = None) -> tf.Tensor:
    """Returns the root's k-th operand, compared with what the others say of it.

    Inside a lowering, on the root's device. Compares what is unknown while the step is
    built: with the specs of the other replicas, and with their tensors.

    Args:
        matched: The communication.
        k: Which operand.
        entries: How many it has to have along its first axis, if that matters.
    """
    root = matched.group.index(matched.options["root"])
    value = matched.operands[root][k]
    specs = [call.agreed[k].shape for call in matched.calls]
    alike = [
        n
        for n, own in enumerate(matched.operands)
        if n != root and k < len(own) and not unknown_shapes.is_known(own[k])
    ]
    fits = all(unknown_shapes.is_known_to_fit(value, spec) for spec in specs)
    known = shapes.static(value)
    counted = entries is None or (known is not None and known[0] is not None)

    def conditions(seen: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        needs = unknown_shapes.equal(seen)
        for spec in specs:
            needs += unknown_shapes.fits(seen[0], spec)
        if not counted:
            needs.append(tf.equal(unknown_shapes.size_along(seen[0], 0), entries))
        return needs

    if alike or not (fits and counted):
        value, *_ = unknown_shapes.check(
            matched,
            [value, *(matched.operands[n][k] for n in alike)],
            conditions,
            "the tensor of the root is not of the shape that the other replicas say"
            + _said(specs[:root] + specs[root + 1 :])
            + ("" if counted else f", or has not {entries} entries, one for each"),
            "let all replicas pass tensors of the shape that the root has, or a "
            "tf.TensorSpec of it.",
            [root, *alike],
        )
        for spec in specs:
            value.set_shape(spec)
    return tf.identity(value)


def _said(specs: Sequence[shapes.Shape]) -> str:
    """Returns the shapes that replicas say, for an error; "" if they say none."""
    texts = [str(list(spec)).replace("None", "?") for spec in specs if spec is not None]
    return "".join(f", {text}" for text in dict.fromkeys(texts))


def values(leaves: Sequence[tf.Tensor | tf.TensorSpec]) -> list[Value]:
    """Returns dtype and static shape of each leaf."""
    return [Value.of(leaf) for leaf in leaves]
