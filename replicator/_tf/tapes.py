# SPDX-License-Identifier: Apache-2.0
"""What gradient tapes record, and whether they do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.framework import ops as _ops
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


def begun_by_tape(graph: tf.Graph, count: int) -> list[tf.Operation]:
    """Returns the ones from which the running GradientTape.gradient started.

    It makes them first, if it is not given others; nothing public has them.

    Args:
        graph: The graph in which it runs.
        count: Of how many targets.

    Returns:
        The last `count` that were made, in order; none if there are fewer.
    """
    found: list[tf.Operation] = []
    for op in reversed(graph.get_operations()):
        if begins_tape(op):
            found.append(op)
        if len(found) == count:
            return found[::-1]
    return []


def begins_tape(op: tf.Operation) -> bool:
    """Whether an op was made by a tape itself, and not by the gradient of an op.

    Nothing but where it was made tells.
    """
    if not op.name.rpartition("/")[2].startswith("ones"):
        return False
    names = [frame.name for frame in op.traceback]
    if "imperative_grad" not in names:
        return False
    place = len(names) - 1 - names[::-1].index("imperative_grad")
    return not {"_gradient_function", "_backprop_call"} & set(names[place:])


def own_gradient(op: tf.Operation) -> Callable[..., Any] | None:
    """Returns the gradient that a user has given an op in place of TensorFlow's.

    By `tf.custom_gradient` or `gradient_override_map`: nothing public looks up what was
    registered. None if there is none, or it is one of this library.
    """
    try:
        name: bytes = op.get_attr("_gradient_op_type")
    except ValueError:
        return None
    if name.startswith(b"Replicator"):
        return None
    found: Callable[..., Any] | None = _ops.get_gradient_function(op)
    return found


def trains_variables(gradient: Any) -> bool:
    """Whether the gradient of a `tf.custom_gradient` has some for variables, too.

    It is not told to whoever looks the gradient up, but is a name in its closure.
    """
    own = inspect.getclosurevars(gradient).nonlocals
    inner = own.get("tape_grad_fn")
    if inner is None:
        return False
    return bool(inspect.getclosurevars(inner).nonlocals.get("variables"))
