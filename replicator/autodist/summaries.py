# SPDX-License-Identifier: Apache-2.0
"""Summaries that a function writes: each once, with the values of the whole batch.

The function is built for each replica, with an op that writes in each. All but the
first replica's are switched off, as in tf.distribute; what it writes is combined over
the replicas beforehand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from replicator import _tf, errors
from replicator.autodist import kinds
from replicator.autodist.examples import Examples
from replicator.autodist.kinds import Kind
from replicator.graph.ir import placeholder
from replicator.graph.ir.kinds import has_effect, kind_of

_HANDLES = (tf.resource, tf.variant)


def once(is_first: tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes only the first replica write the summaries of this block.

    Args:
        is_first: Whether the replica that is built is the first one.
    """
    # All replicas must build the same: none may find that it is a constant.
    return _tf.summaries_if(
        lambda: tf.raw_ops.PlaceholderWithDefault(input=is_first, shape=[])
    )


def combine(ops: Sequence[tf.Operation], own: Examples) -> None:
    """Gives the ops that write summaries the values of the whole batch.

    Args:
        ops: The ops that a function has built for a replica.
        own: The examples of the replica.

    Raises:
        UnsupportedError: A value is not known for the whole batch.
    """
    if not own.are_split:  # all replicas compute the whole batch
        return
    uses = [
        (op, k, tensor)
        for op in filter(_writes, ops)
        for k, tensor in enumerate(op.inputs)
        if tensor.dtype not in _HANDLES
    ]
    if not uses:
        return
    known = own.kinds([tensor for _, _, tensor in uses])
    wholes: dict[int, tf.Tensor | None] = {}
    for op, k, tensor in uses:
        value = known.of(tensor)
        if kinds.is_same(value) or value.kind is Kind.DRAWN:
            continue
        # What a branch computes besides summaries is for the replica's own part.
        is_alone = op.type in ("If", "StatelessIf") and _only_writes(op)
        if is_alone and id(tensor) not in wholes:
            wholes[id(tensor)] = own.of_all(tensor)
        whole = wholes[id(tensor)] if is_alone else None
        if whole is None:
            raise _refused(op, tensor, value)
        _tf.set_input(op, k, whole)


def _only_writes(op: tf.Operation) -> bool:
    """Whether all that a conditional is for are the summaries that it writes."""
    return not any(result.dtype.is_floating for result in op.outputs) and all(
        _is_summary(inner)
        or (_only_writes(inner) if kind_of(inner).calls else not _acts(inner))
        for _, body in _tf.called_graphs(op)
        for inner in body.get_operations()
    )


def _acts(op: tf.Operation) -> bool:
    """Whether an op has an effect, or communicates."""
    return has_effect(op) or placeholder.read(op) is not None


def _writes(op: tf.Operation) -> bool:
    """Whether an op, or a function that it calls, writes summaries."""
    if _is_summary(op):
        return True
    return kind_of(op).calls and any(
        _writes(inner)
        for _, body in _tf.called_graphs(op)
        for inner in body.get_operations()
    )


def _is_summary(op: tf.Operation) -> bool:
    return op.type.startswith("Write") and op.type.endswith("Summary")


def _refused(
    op: tf.Operation, tensor: tf.Tensor, value: kinds.Value
) -> errors.UnsupportedError:
    return errors.UnsupportedError(
        errors.compose(
            f"a summary is written of {tensor.name}, {tensor.dtype.name}"
            f"{tensor.shape}, which differs between replicas: it is {value.said}.",
            [f"at {errors.line_of(op)}"],
            "write means, sums, maxima and minima over the examples; or return the "
            "value, and write the summary outside.",
        )
    )
