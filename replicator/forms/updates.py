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

from replicator.forms import seams
from replicator.variables.partitioned import PartitionedVariable
from replicator.variables.replicated import ReplicatedVariable

_KINDS = (ReplicatedVariable, PartitionedVariable)
_ASSIGNMENTS = {
    "AssignVariableOp": "assign",
    "AssignAddVariableOp": "assign_add",
    "AssignSubVariableOp": "assign_sub",
}
_SCATTERS = {
    f"ResourceScatter{name}": f"scatter_{name.lower()}"
    for name in ("Add", "Sub", "Mul", "Div", "Min", "Max", "Update")
}
_SCATTERS_ND = {
    f"ResourceScatterNd{name}": f"scatter_nd_{name.lower()}"
    for name in ("Add", "Sub", "Min", "Max", "Update")
}
_MASKS = ("begin", "end", "ellipsis", "new_axis", "shrink_axis")


def is_variable(x: Any) -> bool:
    """Whether an input of an op is one of the library's variables."""
    return isinstance(x, _KINDS)


def update(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[Any]:
    """Adds what becomes of an op on variables, and returns its outputs.

    Args:
        replica: The replica that is built, a replay.Replica.
        op: The op.
        inputs: Its inputs: variables in place of their handles.
    """
    variable, given = inputs[0], inputs[1:]
    if op.type in _READS:
        return [_READS[op.type](op, variable, *given)]
    with seams.writing([x for x in inputs if is_variable(x)]):
        done = _written(op, variable, given)
        if done is None:
            return _applied(replica, op, inputs)
    replica.finished(op, done)
    return []


_READS: dict[str, Callable[..., Any]] = {
    "ReadVariableOp": lambda op, v: v._read_variable_op(),
    "ResourceGather": lambda op, v, ids: v.sparse_read(ids),
    "ResourceGatherNd": lambda op, v, ids: v.gather_nd(ids),
    "VariableShape": lambda op, v: tf.constant(v.shape.as_list(), op.outputs[0].dtype),
    "VarIsInitializedOp": lambda op, v: v.is_initialized(),
    "Identity": lambda op, v: v,
}


def _written(
    op: tf.Operation, variable: Any, given: Sequence[tf.Tensor]
) -> tf.Operation | None:
    """Writes by a method of the variable; returns None if none writes like the op."""
    if op.type in _ASSIGNMENTS:
        return getattr(variable, _ASSIGNMENTS[op.type])(given[0], read_value=False)
    if op.type in _SCATTERS:
        rows = tf.IndexedSlices(given[1], given[0])
        return getattr(variable, _SCATTERS[op.type])(rows).op
    if op.type in _SCATTERS_ND:
        return getattr(variable, _SCATTERS_ND[op.type])(*given).op
    if op.type == "ResourceStridedSliceAssign":
        masks = {f"{name}_mask": op.get_attr(f"{name}_mask") for name in _MASKS}
        names = ("begin", "end", "strides", "value")
        where = dict(zip(names, given, strict=True))
        return variable._strided_slice_assign(**where, name=None, **masks).op
    return None


def _applied(replica: Any, op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
    """Adds an op, like an optimizer's, once for each part of the variables."""
    variable = inputs[0]
    parts = getattr(variable, "parts", [variable])
    names = [arg.name for arg in op.op_def.input_arg]
    made: list[tf.Tensor] = []
    for k in range(len(parts)):
        own = [_of_part(x, variable, k) for x in inputs]
        if len(parts) > 1 and "indices" in names:
            own = _own_rows(own, names, variable, k)
        made = list(replica.add(op, own).outputs)
    return made


def _of_part(x: Any, variable: Any, k: int) -> Any:
    """Returns the part of an input that belongs to a part of the variable."""
    if is_variable(x):
        return getattr(x, "parts", [x])[k].handle
    is_like = isinstance(variable, PartitionedVariable) and x.shape.rank
    return variable.split(x)[k] if is_like and x.shape == variable.shape else x


def _own_rows(
    inputs: list[Any], names: list[str], variable: PartitionedVariable, k: int
) -> list[Any]:
    """Returns inputs of an op that updates rows: only those of a part of the variable."""
    where = names.index("indices")
    update = next(n for n, name in enumerate(names) if name in ("grad", "updates"))
    rows, first = inputs[where], sum(variable.sizes[:k])
    if variable.axis:
        raise NotImplementedError
    first, size = (tf.constant(n, rows.dtype) for n in (first, variable.sizes[k]))
    is_own = (rows >= first) & (rows < first + size)
    inputs[where] = tf.boolean_mask(rows, is_own) - first
    inputs[update] = tf.boolean_mask(inputs[update], is_own)
    return inputs
