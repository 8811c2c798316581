"""What corresponds on two replicas though it is not the same: `alike.py`'s vocabulary.

Pure functions of ops, attributes and calls; they change no graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator.graph import placeholder
from replicator.graph.kinds import kind_of
from replicator.graph.placeholder import Call

_CUT = {"reduce_scatter": "axis", "scatter": "axis", "all_to_all": "split_axis"}


def captures(graph: tf.Graph) -> dict[int, tf.Tensor]:
    """Returns what the inputs of a function being traced stand for, by their ids."""
    found: dict[int, tf.Tensor] = {}
    outer, known = graph, []
    while getattr(outer, "building_function", False):
        known.append({id(inner): external for external, inner in outer.captures})
        outer = outer.outer_graph
    for tensor_id, external in known[0].items() if known else ():
        for more in known[1:]:
            external = more.get(id(external), external)
        found[tensor_id] = external
    return found


def live(
    ops: Sequence[tf.Operation], roots: Iterable[Any], captured: Mapping[int, Any]
) -> list[tf.Operation]:
    """Returns the ops that do something, or on which such ops depend, in order."""
    own = set(ops)
    found: set[tf.Operation] = set()
    stack = [root if isinstance(root, tf.Operation) else root.op for root in roots]
    for op in ops:
        kind = kind_of(op)
        if kind.stateful or kind.calls or placeholder.read(op) is not None:
            stack.append(op)
    while stack:
        op = stack.pop()
        if op in own and op not in found:
            if op.type == "Placeholder" and id(op.outputs[0]) in captured:
                continue
            found.add(op)
            stack += [tensor.op for tensor in op.inputs]
            stack += op.control_inputs
    return [op for op in ops if op in found]


def function_names(values: Sequence[Any]) -> tuple[list[str], list[str]] | None:
    """Returns the functions that two attributes name, if they are as many."""
    names = [
        [value.func.name]
        if value.HasField("func")
        else [function.name for function in value.list.func]
        for value in values
    ]
    if not names[0] or len(names[0]) != len(names[1]):
        return None
    return names[0], names[1]


def rename(value: Any, old: str, new: str) -> Any:
    """Returns a string attribute, or a string constant, that speaks of another scope.

    Assertions hold the names of tensors.
    """
    copy = type(value)()
    copy.CopyFrom(value)
    if value.HasField("s"):
        copy.s = value.s.replace(old.encode(), new.encode())
    elif value.HasField("tensor"):
        for n, text in enumerate(value.tensor.string_val):
            copy.tensor.string_val[n] = text.replace(old.encode(), new.encode())
    return copy


def place(one: str, two: str, devices: Sequence[str], replica_id: int) -> str | None:
    """Returns where a replica has what replicas 0 and 1 have on devices one and two.

    Returns:
        None if the two do not correspond.
    """
    if (one, two) == tuple(devices[:2]):
        return devices[replica_id]
    return two if one == two else None


def call_difference(one: Call, two: Call, count: int) -> str:
    """Says why the calls of two replicas do not tell those of further ones, or ""."""
    for field in dataclasses.fields(Call):
        name = field.name
        if name not in ("replica_id", "device", "line"):
            if getattr(one, name) != getattr(two, name):
                return f"not the same {name} of {one.primitive}"
    if one.group != tuple(range(count)):
        return (
            f"{one.primitive} in the group {list(one.group)}, and not of all replicas"
        )
    if one.options.get("root", 0) > 1:
        return f"{one.primitive} with the root {one.options['root']}, which is a copy"
    if "splits" in one.options:
        return f"{one.primitive} with the sizes of slices"
    if one.primitive in _CUT:
        axis = one.options.get(_CUT[one.primitive])
        for value in one.agreed:
            if (
                axis is not None
                and value.shape
                and -len(value.shape) <= axis < len(value.shape)
            ):
                size = value.shape[axis]
                if size is not None and size % count:
                    return f"{one.primitive} of slices that are not all of one size"
    return ""
