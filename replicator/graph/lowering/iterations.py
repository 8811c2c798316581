# SPDX-License-Identifier: Apache-2.0
"""Counts a loop's iterations where that is possible before it runs.

A loop with a counter makes the same number of iterations whatever else it computes: its
condition is evaluated here on the counters alone, in NumPy. merge.py unrolls several
iterations of short loops, which saves most of the overhead of an iteration: the
condition's result has to reach every device before an iteration can begin there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from replicator._tf import effects, functions
from replicator.graph.ir.kinds import kind_of

_MOST_ITERATIONS = 2_000  # counting takes 0.1 ms each, and gains little beyond
_MOST_OPS = 400  # in an unrolled body
_UNROLL_FACTORS = (8, 7, 6, 5, 4, 3, 2)
_FUNCTIONS = ("body", "cond")  # of a loop

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


def unroll_factor(loops: Sequence[tf.Operation], total: int | None) -> int:
    """Returns how many iterations of merged loops to unroll into one.

    Args:
        loops: One loop per replica, known to make equal numbers of iterations.
        total: The number of iterations, by `count`; None where that is unknown.

    Returns:
        A divisor of the number of iterations; 1 where that is unknown, or where an
        iteration has side effects, which would have to be ordered, or draws random
        numbers, which a copy of the op would repeat.
    """
    graphs = [
        functions.function_body(op, name)[0] for op in loops for name in _FUNCTIONS
    ]
    ops = [op for graph in graphs for op in graph.get_operations()]
    if any(graph.control_outputs for graph in graphs) or any(map(_has_state, ops)):
        return 1
    for factor in _UNROLL_FACTORS:
        if total and total % factor == 0 and factor * len(ops) <= _MOST_OPS:
            return factor
    return 1


def _has_state(op: tf.Operation) -> bool:
    return kind_of(op).stateful and not effects.only_reads(op)


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
