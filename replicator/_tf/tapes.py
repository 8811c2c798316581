# SPDX-License-Identifier: Apache-2.0
"""What gradient tapes record, and whether any is recording."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record


def record_gradient(
    name: str,
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[..., Any],
) -> None:
    """Records on all tapes how to differentiate outputs with respect to inputs.

    `tf.custom_gradient` does the same but adds an IdentityN that holds the operands.
    """
    record.record_operation(name, list(outputs), list(inputs), backward)


def may_record() -> bool:
    """Whether a tape or another recorder is active; a public tape knows only itself."""
    return bool(record.could_possibly_record())


def stop_recording() -> Any:
    """Pauses all tapes in this block; the public call pauses only one."""
    return record.stop_recording()


def _created_by_tape(op: tf.Operation) -> bool:
    """Whether the tape created an op for its ones, and not a gradient function."""
    names = [frame.name for frame in op.traceback or ()]
    if "imperative_grad" not in names:
        return False
    start = len(names) - names[::-1].index("imperative_grad")
    return names[start] in ("_ones", "ones_like")


def is_part_of_pass(op: tf.Operation) -> bool:
    """Whether a GradientTape.gradient or tf.gradients created an op.

    Ops added in bulk have no traceback. They are what their first operand is.
    """
    while op.traceback is None and op.inputs:
        op = op.inputs[0].op
    frames = op.traceback or ()
    return any(
        frame.name in ("imperative_grad", "_GradientsHelper") for frame in frames
    )


def differentiated_by(op: tf.Operation) -> tf.Operation | None:
    """Returns the op that this one differentiates for tf.gradients, or None.

    Nothing public shows it, and tapes do not record it.
    """
    forward: tf.Operation | None = op._original_op
    return forward


def begins_pass(op: tf.Operation) -> bool:
    """Whether an op is among the ones that such a call began from; see above."""
    place = _BEGINNING.search(op.name)
    if place is None:
        return False
    if place["ys"]:
        # Otherwise a copy of the arguments of tf.gradients, which the gradients of
        # control flow pass on, or a function's parameter that is named after one.
        return op.type not in ("Identity", "Placeholder") and is_part_of_pass(op)
    return _created_by_tape(op)


# A tape's ones and the ops that they are made of; the ones of tf.gradients.
_BEGINNING = re.compile(r"(^|/)((?P<ys>grad_ys_\d+)|ones(_like)?)(_\d+)?(/[^/]+)?$")


def pass_starts(graph: tf.Graph) -> list[int]:
    """Returns the numbers of the ops at which those calls began that began from ones.

    The ones of one call follow each other.
    """
    numbers, was_begin = [], False
    for op in graph.get_operations():
        begins = begins_pass(op)
        if begins and not was_begin:
            numbers.append(number_of(op))
        was_begin = begins
    return numbers


def number_of(op: tf.Operation) -> int:
    """Returns a number that grows with each op of a graph; the public API has none."""
    return int(op._id)


def is_recorded(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a tape that is now recording watches one of the tensors."""
    if not record.could_possibly_record():
        return False
    return bool(record.should_record_backprop(list(tensors)))
