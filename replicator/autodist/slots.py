# SPDX-License-Identifier: Apache-2.0
"""Finds the slot variables of optimizers in a single-device graph.

A graph does not name them. Ops that update several variables have the trained one as
their first input; optimizers that update by assignment read a slot of the same shape
and compute the variable's new value from it element by element.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import functions
from replicator.forms.rules import elementwise
from replicator.graph.ir.kinds import resource_inputs

UPDATES = re.compile(r"Resource(Sparse)?Apply\w+")
WRITERS = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")
# Each element of a result depends on the same element of each operand, or on scalars.
_ELEMENTWISE = {
    *elementwise.TYPES.split(),
    *elementwise.MOVING.split(),
    *"OnesLike Select ZerosLike".split(),
}
_CALLS = re.compile(r"(Stateful)?PartitionedCall|(Stateless)?(If|Case|While)")

Behind = Callable[[tf.Tensor], Any]  # returns a handle's variable, or None


def find(ops: Sequence[tf.Operation], behind: Behind) -> dict[str, str]:
    """Maps the names of slots to those of their variables.

    Args:
        ops: The ops of the graph.
        behind: Returns the variable that a tensor is a handle of, or None.
    """
    primaries: dict[str, str] = {}
    for op in ops:
        if UPDATES.fullmatch(op.type):
            variables = [behind(tensor) for _, tensor in resource_inputs(op)]
            names = [updated.op.name for updated in variables if updated is not None]
            primaries.update((name, names[0]) for name in names[1:])
    for op in ops:
        if op.type not in WRITERS or op.inputs[1].op.type not in _ELEMENTWISE:
            continue
        variable = behind(op.inputs[0])
        if variable is not None and variable.trainable and variable.dtype.is_floating:
            for slot in _read(op.inputs[1], variable, behind):
                primaries.setdefault(slot.op.name, variable.op.name)
    for op in ops:
        for body in _bodies(op):
            given = zip(body.inputs, op.inputs[-len(body.inputs) :], strict=True)
            handles = {inside.ref(): behind(outside) for inside, outside in given}
            inner = functools.partial(_given, handles)
            primaries = find(body.get_operations(), inner) | primaries
    return primaries


def _given(handles: Mapping[Any, Any], tensor: tf.Tensor) -> Any:
    return handles.get(tensor.ref())


def _bodies(op: tf.Operation) -> list[Any]:
    """Returns the functions that an op calls with its own inputs."""
    if not _CALLS.fullmatch(op.type):
        return []
    return [body for _, body in functions.called_graphs(op) if body.inputs]


def _read(value: tf.Tensor, variable: Any, behind: Behind) -> Iterator[Any]:
    """Yields the untrained variables of a variable's shape that a value depends on."""
    seen, stack = {value.op}, [value.op]
    while stack:
        op = stack.pop()
        if op.type == "ReadVariableOp":
            read = behind(op.inputs[0])
            if read is not None and not read.trainable and _fits(read, variable):
                yield read
        elif op.type in _ELEMENTWISE and op.outputs[0].shape == variable.shape:
            sources = {tensor.op for tensor in op.inputs} - seen
            seen |= sources
            stack += sources


def _fits(slot: Any, variable: Any) -> bool:
    are_known = variable.shape.is_fully_defined() and slot.shape.is_fully_defined()
    return are_known and slot.shape == variable.shape and slot.dtype.is_floating
