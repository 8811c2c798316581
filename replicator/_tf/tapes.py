# SPDX-License-Identifier: Apache-2.0
"""What gradient tapes record, and whether they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import resource_variable_ops as _rvo


def record_gradient(
    name: str,
    outputs: Sequence[tf.Tensor],
    inputs: Sequence[tf.Tensor],
    backward: Callable[..., Any],
) -> None:
    """Tells all tapes how to differentiate outputs by inputs.

    `tf.custom_gradient` does the same but adds an IdentityN that holds the operands.
    """
    record.record_operation(name, list(outputs), list(inputs), backward)


def is_watched(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a tape watches one of the tensors, or might come to if there is no tape.

    A public tape tells its variables only.
    """
    if record.could_possibly_record():
        return bool(record.should_record_backprop(list(tensors)))
    return any(t.dtype.is_floating or t.dtype.is_complex for t in tensors)


def may_record() -> bool:
    """Whether there is a tape, or whatever else records; a public tape knows itself."""
    return bool(record.could_possibly_record())


def note_read(variable: Any) -> None:
    """Has all tapes watch a variable that is about to be read.

    The public call has one tape watch it.
    """
    _rvo.variable_accessed(variable)


def stop_recording() -> Any:
    """In this block no tape records; the public call stops one tape only."""
    return record.stop_recording()
