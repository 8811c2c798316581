# SPDX-License-Identifier: Apache-2.0
"""Ops on variables: each becomes a call of the library's variable.

The copy of a variable's handle is the library's variable itself. So placement, owners,
parts, proxies and the order of reads and writes are those of every step. What is
written is the same on all replicas by its form, or a part of what they add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from replicator import errors
from replicator.graph.ir import shapes
from replicator.graph.passes.rows import Parts
from replicator.variables import whole_values
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.replicated import ReplicatedVariable

_KINDS = (ReplicatedVariable, PartitionedVariable)
_ASSIGNMENTS = {
    "AssignVariableOp": "assign",
    "AssignAddVariableOp": "assign_add",
    "AssignSubVariableOp": "assign_sub",
}
_WRITING = ("Assign", "Resource", "Rng", "StatefulUniform", "StatefulRandom")
_MASKS = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")


def is_variable(x: Any) -> bool:
    """Whether an input of an op is one of the library's variables."""
    return isinstance(x, _KINDS)


def refuse_outside(op: tf.Operation, inputs: Sequence[Any]) -> None:
    """Raises if an op writes a variable that is not the library's.

    Such a variable, of which there is one for all replicas, can only be read.

    Args:
        op: The op.
        inputs: Its inputs.

    Raises:
        ContextError: It does.
    """
    if not inputs or not op.type.startswith(_WRITING) or op.type in _READS:
        return
    handle = inputs[0]
    if isinstance(handle, tf.Tensor) and handle.dtype == tf.resource:
        if not tf.is_symbolic_tensor(handle):
            raise errors.ContextError(
                "a variable that was created outside of the context is written, by "
                f"{op.name}: it has no component per replica.",
                fix="create it under `with repl.context():`. Or let it only be read: "
                "leave it out of what is trained.",
            )


def update(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
    """Adds what becomes of an op on variables, and returns its outputs.

    Args:
        replica: The replica that is built, a replay.Replica.
        op: The op.
        inputs: Its inputs: variables in place of their handles.
    """
    variable, given = inputs[0], inputs[1:]
    if op.type in _READS:
        replica.writes.refresh([variable])
        return [_READS[op.type](op, variable, *given)]
    with replica.writes.writing([x for x in inputs if is_variable(x)]):
        done = _written(op, variable, given)
        if done is None:
            return _applied(replica, op, inputs)
    replica.finished(op, done)
    return []


_READS: dict[str, Callable[..., Any]] = {
    "ReadVariableOp": lambda op, v: whole_values.read(v),
    "ResourceGather": lambda op, v, ids: whole_values.read_rows(v, ids),
    "ResourceGatherNd": lambda op, v, ids: whole_values.read_slices(v, ids),
    "VariableShape": lambda op, v: tf.constant(v.shape.as_list(), op.outputs[0].dtype),
    "VarIsInitializedOp": lambda op, v: v.is_initialized(),
    "Identity": lambda op, v: v,
}


def _written(
    op: tf.Operation, variable: Any, given: Sequence[tf.Tensor]
) -> tf.Operation | None:
    """Writes by a method of the variable; returns None if none writes like the op."""
    if op.type in _ASSIGNMENTS:
        method = _ASSIGNMENTS[op.type]
        value = whole_values.written(variable, given[0], method)
        return getattr(variable, method)(value, read_value=False)
    _, is_scatter, how = op.type.lower().partition("resourcescatter")
    if is_scatter and how.startswith("nd"):
        return getattr(variable, f"scatter_nd_{how[2:]}")(*given).op
    if is_scatter:
        rows = tf.IndexedSlices(given[1], given[0])
        return getattr(variable, f"scatter_{how}")(rows).op
    if op.type == "ResourceStridedSliceAssign":
        masks = {f"{name}_mask": op.get_attr(f"{name}_mask") for name in _MASKS}
        names = ("begin", "end", "strides", "value")
        where = dict(zip(names, given, strict=True))
        return variable._strided_slice_assign(**where, name=None, **masks).op
    return None


def _applied(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
    """Adds an op, like an optimizer's, once for each part of the variables."""
    variable = inputs[0]
    _refuse_unlike(op, [x for x in inputs if is_variable(x)])
    count = len(getattr(variable, "parts", [variable]))
    names = [arg.name for arg in op.op_def.input_arg]
    whole = dict(zip(names, inputs, strict=True))
    columns = {
        name: [part.handle for part in getattr(x, "parts", [x])]
        if is_variable(x)
        else [x] * count
        for name, x in whole.items()
    }
    if isinstance(variable, PartitionedVariable):
        columns |= _divided(whole, variable)
    made: list[tf.Tensor] = []
    for own in zip(*columns.values(), strict=True):
        made = list(replica.add(op, own).outputs)
    return made


def _divided(
    whole: dict[str, Any], variable: PartitionedVariable
) -> dict[str, list[tf.Tensor]]:
    """Returns the arguments of an optimizer's op of which each part gets a part."""
    name = "delta" if "delta" in whole else "grad"
    gradient = whole[name]
    if "indices" not in whole:
        return {name: variable.split(gradient)}
    rows = tf.IndexedSlices(gradient, whole["indices"])
    slices = variable.layout.cut(rows, shapes.defined(variable), gradient.dtype)
    values, indices = [part.values for part in slices], [p.indices for p in slices]
    return {name: values, "indices": indices}


def _refuse_unlike(op: tf.Operation, variables: Sequence[Any]) -> None:
    """Raises if variables that one op updates are not in the same parts.

    Raises:
        UnsupportedError: They are not.
    """
    if len({_division(one) for one in variables}) < 2:
        return
    whole = [one.name for one in variables if _division(one) is None]
    what = f"{', '.join(whole)} whole" if whole else "others in other parts"
    first = next(one for one in variables if _division(one) is not None)
    raise errors.UnsupportedError(
        f"{op.name} ({op.type}) updates {first.name}, which is in parts, along with "
        f"{what}: there is no update of a part of each.",
        fix="choose a strategy that divides none of them, or update by assign().",
    )


def _division(variable: Any) -> Parts | None:
    return variable.layout if isinstance(variable, PartitionedVariable) else None
