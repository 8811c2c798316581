# SPDX-License-Identifier: Apache-2.0
"""Counts a loop's iterations where that is possible before it runs.

A loop with a counter makes the same number of iterations whatever else it computes: its
condition is evaluated here on the counters alone, in NumPy, so that a plan can say how
often the loop's body communicates in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator._tf import functions

_MOST_ITERATIONS = 2_000  # counting takes 0.1 ms each, and gains little beyond

# The ops evaluated here; with any other op, the number of iterations is unknown.
_COUNTING: dict[str, Callable[..., Any]] = {
    "AddV2": np.add,
    "Equal": np.equal,
    "FloorDiv": np.floor_divide,
    "Greater": np.greater,
    "GreaterEqual": np.greater_equal,
    "Identity": lambda x: x,
    "Less": np.less,
    "LessEqual": np.less_equal,
    "LogicalAnd": np.logical_and,
    "LogicalNot": np.logical_not,
    "LogicalOr": np.logical_or,
    "Maximum": np.maximum,
    "Minimum": np.minimum,
    "Mul": np.multiply,
    "NotEqual": np.not_equal,
    "Sub": np.subtract,
}


def count(loop: tf.Operation) -> int | None:
    """Returns the number of a loop's iterations, or None if it is unknown here."""
    values = [_constant(tensor) for tensor in loop.inputs]
    body, updated = functions.function_body(loop, "body")
    condition, (goes_on,) = functions.function_body(loop, "cond")
    for iterations in range(_MOST_ITERATIONS):
        continues = _evaluate(goes_on, condition.inputs, values)
        if continues is None:
            return None
        if not continues:
            return iterations
        values = [
            None if value is None else _evaluate(result, body.inputs, values)
            for value, result in zip(values, updated, strict=True)
        ]
    return None


def _constant(tensor: tf.Tensor) -> Any:
    """Returns the value of a constant integer or boolean scalar, else None."""
    scalar = tensor.shape.rank == 0
    if not scalar or not (tensor.dtype.is_integer or tensor.dtype.is_bool):
        return None
    return tf.get_static_value(tensor)


def _evaluate(
    result: tf.Tensor, arguments: Sequence[tf.Tensor], values: Sequence[Any]
) -> Any:
    """Computes a function's result from the known arguments, or returns None."""
    computed = {id(t): value for t, value in zip(arguments, values, strict=True)}
    stack = [result]
    while stack:
        tensor = stack[-1]
        if id(tensor) in computed:
            stack.pop()
        elif tensor.op.type == "Const":
            computed[id(tensor)] = _constant(tensor)
        elif tensor.op.type not in _COUNTING:
            return None
        else:
            missing = [t for t in tensor.op.inputs if id(t) not in computed]
            stack += missing
            if not missing:
                inputs = [computed[id(t)] for t in tensor.op.inputs]
                computed[id(tensor)] = _apply(tensor, inputs)
    return computed[id(result)]


def _apply(tensor: tf.Tensor, inputs: Sequence[Any]) -> Any:
    """Computes one op; overflow wraps around, as in TensorFlow."""
    if any(value is None for value in inputs):
        return None
    with np.errstate(all="ignore"):
        result = _COUNTING[tensor.op.type](*inputs)
    return np.asarray(result).astype(tensor.dtype.as_numpy_dtype)[()]
