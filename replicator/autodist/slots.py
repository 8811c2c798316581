# SPDX-License-Identifier: Apache-2.0
"""Which variables of a single-device graph go with others: the slots of optimizers.

Nothing in a graph says so. An op that updates several variables names the one that is
trained first; optimizers that update by assignments read a slot of the same shape, and
compute the variable's value of it element by element.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator.graph.ir.kinds import resource_inputs

UPDATES = re.compile(r"Resource(Sparse)?Apply\w+")
WRITERS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Each element of a result is computed of the same element of each operand, or numbers.
ELEMENTWISE = frozenset(
    "Abs Add AddN AddV2 Cast CheckNumerics ClipByValue Cos Div DivNoNan Elu Equal Erf "
    "Exp Expm1 Floor FloorDiv Greater GreaterEqual Identity Inv IsFinite IsInf IsNan "
    "Less LessEqual Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul "
    "MulNoNan Neg NotEqual OnesLike Pow PreventGradient RealDiv Reciprocal Relu Rint "
    "Round Rsqrt Select SelectV2 Sigmoid Sign Sin Softplus Sqrt Square "
    "SquaredDifference StopGradient Sub Tanh ZerosLike".split()
)

Behind = Callable[[tf.Tensor], Any]  # the variable of which a tensor is a handle


def find(ops: Sequence[tf.Operation], behind: Behind) -> dict[str, str]:
    """Returns the variables that go with another, by their names.

    Args:
        ops: Of the graph.
        behind: Returns the variable of which a tensor is a handle, or None.
    """
    found: dict[str, str] = {}
    for op in ops:
        if UPDATES.fullmatch(op.type):
            own = [behind(tensor) for _, tensor in resource_inputs(op)]
            names = [one.op.name for one in own if one is not None]
            found.update((name, names[0]) for name in names[1:])
    for op in ops:
        if op.type not in WRITERS or op.inputs[1].op.type not in ELEMENTWISE:
            continue
        variable = behind(op.inputs[0])
        if variable is not None and variable.trainable and variable.dtype.is_floating:
            for slot in _read(op.inputs[1], variable, behind):
                found.setdefault(slot.op.name, variable.op.name)
    return found


def _read(value: tf.Tensor, variable: Any, behind: Behind) -> Iterator[Any]:
    """Yields what is not trained and of a variable's shape, of what a value is made."""
    seen, stack = {value.op}, [value.op]
    while stack:
        op = stack.pop()
        if op.type == "ReadVariableOp":
            read = behind(op.inputs[0])
            if read is not None and not read.trainable and _fits(read, variable):
                yield read
        elif op.type in ELEMENTWISE and op.outputs[0].shape == variable.shape:
            sources = {tensor.op for tensor in op.inputs} - seen
            seen |= sources
            stack += sources


def _fits(slot: Any, variable: Any) -> bool:
    known = variable.shape.is_fully_defined() and slot.shape.is_fully_defined()
    return known and slot.shape == variable.shape and slot.dtype.is_floating
