# SPDX-License-Identifier: Apache-2.0
"""Shared by the primitives with a root: broadcast, scatter, reduce and gather.

Where only the root passes a value, the other replicas describe it: by a tf.TensorSpec,
or by a tensor like it whose values are not used. Gradients flow only if the tape
watches something on every replica, since every replica takes part in them. Trailing
operands are never sent; they only make the tape record the call. A receipt stands for
what a replica passed to the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from replicator import context, errors
from replicator.graph.ir import shapes
from replicator.graph.ir.placeholder import OperandPolicy, Value
from replicator.graph.lowering.matched import Matched
from replicator.primitives import base, flows, unknown_shapes


def is_root(root: int) -> bool:
    """Whether the replica being built is the root."""
    replica = context.require("a root")
    replica.build.refuse_copies("which replica is the root")
    return replica.replica_id == root


def check_dense(what: str, leaves: Sequence[Any], verb: str) -> None:
    """Raises ArgumentError if a leaf is sparse.

    Args:
        what: The primitive.
        leaves: The result of `base.flatten`.
        verb: What the primitive does, e.g. "send".
    """
    if any(isinstance(leaf, tf.IndexedSlices) for leaf in leaves):
        raise base.bad_argument(
            what, f"cannot {verb} IndexedSlices", f"{what} its values and indices."
        )


def root_operands(
    what: str, value: Any, root: int
) -> tuple[list[tf.Tensor], list[tf.Tensor | tf.TensorSpec]]:
    """Reads the argument of a primitive that uses only the root's value.

    Args:
        what: The primitive, for messages.
        value: On the root a nest of tensors; elsewhere that, or a nest of TensorSpecs.
        root: The root.

    Returns:
        The operands, and one description of dtype and shape per leaf. For tensors both
        are the tensors; for specs there are no operands, and the specs.

    Raises:
        ArgumentError: The root passes specs, another replica mixes specs and tensors,
            or a leaf is sparse.
    """
    inputs = base.flat(value, what)
    specs = [leaf for leaf in inputs if isinstance(leaf, tf.TensorSpec)]
    if specs and is_root(root):
        raise base.bad_argument(
            what,
            f"was given {errors.repr_of(specs[0])}, but it is the root",
            "the root passes tensors; the others may pass a tf.TensorSpec.",
        )
    if specs and len(specs) < len(inputs):
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
    """Returns the gradients of operands that only make the tape record a call.

    Args:
        like: The operands.
        tied: Whether the latest communication returned a receipt. The zeros then depend
            on it, so that they can be differentiated wherever the root's gradients can.
    """
    receipt = flows.last_receipt("a gradient") if tied else None
    return [
        None
        if not flows.is_differentiable(x)
        else tf.zeros_like(x)
        if receipt is None
        else tf.zeros_like(x) + tf.cast(receipt, x.dtype)
        for x in like
    ]


def in_place(
    tensor: tf.Tensor, root: int, members: tuple[int, ...], policy: OperandPolicy
) -> tf.Tensor:
    """Replaces all replicas' tensors, which differ in rounding at most, by the root's.

    Args:
        tensor: The result of each for the same operands, computed in its own order.
        root: The replica whose tensor all receive.
        members: The replicas.
        policy: The variable that the tensor belongs to.

    Returns:
        The root's tensor, with the gradient of this replica's.
    """
    (received,) = base.communicate(
        "broadcast",
        {"root": root},
        [tensor],  # of all: copies of a replica must not differ from it
        values([tensor]),
        agreed=values([tensor]),
        group=members,
        differentiable=False,
        policies=[policy],
    )

    @tf.custom_gradient
    def replaced(_: tf.Tensor) -> Any:
        return tf.identity(received), lambda upstream: upstream

    return replaced(tensor)


def as_agreed(matched: Matched, k: int, entries: int | None = None) -> tf.Tensor:
    """Returns the root's k-th operand, checked against what the other replicas expect.

    Called in a lowering, on the root's device. Checks, at run time, shapes that are
    unknown while the step is built: against the other replicas' specs and tensors.

    Args:
        matched: The communication.
        k: The index of the operand.
        entries: The size that its first axis must have; None: any.
    """
    root = matched.group.index(matched.options["root"])
    value = matched.operands[root][k]
    specs = [call.agreed[k].shape for call in matched.calls]
    unknown = [
        n
        for n, operands in enumerate(matched.operands)
        if n != root and k < len(operands) and not unknown_shapes.is_known(operands[k])
    ]
    fits = all(unknown_shapes.is_known_to_fit(value, spec) for spec in specs)
    static_shape = shapes.static(value)
    size_is_known = entries is None or (
        static_shape is not None and static_shape[0] is not None
    )

    def conditions(vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        checks = unknown_shapes.equal(vectors)
        for spec in specs:
            checks += unknown_shapes.fits(vectors[0], spec)
        if not size_is_known:
            checks.append(tf.equal(unknown_shapes.size_along(vectors[0], 0), entries))
        return checks

    if unknown or not (fits and size_is_known):
        value, *_ = unknown_shapes.check(
            matched,
            [value, *(matched.operands[n][k] for n in unknown)],
            conditions,
            "the root's tensor does not have the shape that the other replicas expect"
            + _expected_shapes(specs[:root] + specs[root + 1 :])
            + (
                ""
                if size_is_known
                else f", or does not have {entries} entries, one for each"
            ),
            "let all replicas pass tensors of the root's shape, or a "
            "tf.TensorSpec of it.",
            [root, *unknown],
        )
        for spec in specs:
            value.set_shape(spec)
    return tf.identity(value)


def _expected_shapes(specs: Sequence[shapes.Shape]) -> str:
    """Returns the shapes that replicas expect, for an error; "" if they expect none."""
    texts = [str(list(spec)).replace("None", "?") for spec in specs if spec is not None]
    return "".join(f", {text}" for text in dict.fromkeys(texts))


def values(leaves: Sequence[tf.Tensor | tf.TensorSpec]) -> list[Value]:
    """Returns dtype and static shape of each leaf."""
    return [Value.of(leaf) for leaf in leaves]
