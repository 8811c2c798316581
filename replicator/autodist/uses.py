# SPDX-License-Identifier: Apache-2.0
"""Finds the ops that use variables, and whether they could use them in parts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.autodist.slots import UPDATES
from replicator.graph.ir.kinds import chooses, kind_of, resource_inputs

LOOPS = ("While", "StatelessWhile")
FUNCTIONS = ("PartitionedCall", "StatefulPartitionedCall")
CALLS = ("If", "StatelessIf", "Case", "StatelessCase", *LOOPS, *FUNCTIONS)
READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd")
PASSED_ON = ("Identity", "Switch", "Enter")  # their results are still handles
_KNOWN = re.compile(
    r"ReadVariableOp|VarIsInitializedOp|VariableShape|Assign(Add|Sub)?VariableOp"
    r"|ResourceGather(Nd)?|ResourceScatter(Nd)?(Add|Sub|Update|Max|Min)"
    r"|ResourceScatter(Mul|Div)|ResourceStridedSliceAssign"
)


def obstacle(program: Any, names: Sequence[str]) -> tf.Operation | None:
    """Returns an op that cannot use variables in parts, or None if all can.

    Args:
        program: The single-device graph.
        names: The names of variables that would be partitioned alike.
    """
    handles: dict[int, tf.Tensor] = {}
    for name in names:
        handle = program.variables[name].op.outputs[0]
        handles[id(handle)] = handle
    return _refusing(handles)


def _refusing(known: Mapping[int, tf.Tensor]) -> tf.Operation | None:
    """Returns an op that cannot use the variables behind handles in parts, or None.

    Args:
        known: The handles, in one graph, by their ids.
    """
    handles = dict(known)
    stack = list(known.values())
    seen: set[tf.Operation] = set()
    while stack:
        for op in stack.pop().consumers():
            if op in seen:
                continue
            if op.type in PASSED_ON or op.type in LOOPS:
                passed_handles = _passed_on(op, handles)
                handles.update((id(tensor), tensor) for tensor in passed_handles)
                stack += passed_handles
            seen.add(op)
    return next((op for op in seen if not _takes_parts(op, handles)), None)


def _passed_on(op: tf.Operation, handles: Mapping[int, tf.Tensor]) -> list[tf.Tensor]:
    """Returns the results of an op that are handles, too."""
    if op.type in LOOPS:
        pairs = zip(op.inputs, op.outputs, strict=True)
        return [out for operand, out in pairs if id(operand) in handles]
    return list(op.outputs)


def _takes_parts(op: tf.Operation, handles: Mapping[int, tf.Tensor]) -> bool:
    if op.type in PASSED_ON or _KNOWN.fullmatch(op.type):
        return True
    if UPDATES.fullmatch(op.type):
        return all(id(tensor) in handles for _, tensor in resource_inputs(op))
    return op.type in CALLS and all(
        _body_takes_parts(op, attribute, name, handles)
        for attribute, name in called(op)
    )


def _body_takes_parts(
    op: tf.Operation, attribute: str, name: str, handles: Mapping[int, tf.Tensor]
) -> bool:
    """Whether a function can take parts from an op that calls it."""
    function = _tf.function_called(op, name)
    if function is None or _tf.compiled(op, name):
        return False
    body, results = function
    inside = {
        id(argument): argument
        for tensor, argument in zip(arguments(op), body.inputs, strict=False)
        if id(tensor) in handles
    }
    for k, tensor in enumerate(results):
        is_unchanged = attribute == "body" and tensor is body.inputs[k]
        if tensor.dtype == tf.resource and id(tensor) in inside and not is_unchanged:
            return False
    return _refusing(inside) is None


def arguments(op: tf.Operation) -> list[tf.Tensor]:
    """Returns the arguments that an op passes to the functions it calls."""
    return list(op.inputs)[1 if chooses(op) else 0 :]


def called(op: tf.Operation) -> list[tuple[str, str]]:
    """Returns (attribute, name) of each function that an op calls."""
    if not kind_of(op).calls:
        return []
    functions = []
    for attribute, value in sorted(op.node_def.attr.items()):
        names = [value.func.name] if value.HasField("func") else []
        names += [function.name for function in value.list.func]
        functions += [(attribute, name) for name in names]
    return functions


def passed_on(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the handle that a tensor was passed on from."""
    while tensor.dtype == tf.resource:
        op = tensor.op
        if op.type in PASSED_ON:
            tensor = op.inputs[0]
        elif op.type in LOOPS:
            tensor = op.inputs[tensor.value_index]
        else:
            break
    return tensor


def needing_components(program: Any) -> dict[str, str]:
    """Returns the variables that need a component on each replica, and why.

    XLA reaches a single device, and so do the functions of datasets.

    Args:
        program: The single-device graph.
    """
    reasons: dict[str, str] = {}
    for op in program.ops:
        if not kind_of(op).calls or (op.type in CALLS and not _compiles(op)):
            continue
        user = "a function with jit_compile=True" if op.type in CALLS else op.type
        for tensor in op.inputs:
            variable = program.variable_behind(tensor)
            if variable is not None:
                reasons.setdefault(variable.op.name, f"used in {user}")
    return reasons


def _compiles(op: tf.Operation) -> bool:
    """Whether XLA compiles a function that an op calls, at any depth."""
    for _, name in called(op):
        function = _tf.function_called(op, name)
        if _tf.compiled(op, name) or (
            function is not None and any(map(_compiles, function[0].get_operations()))
        ):
            return True
    return False
