# SPDX-License-Identifier: Apache-2.0
"""Rules for treating two replicas' ops and attributes as equivalent; see `proof.py`.

Pure functions of ops, attributes and calls; they change no graph.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.graph.ir import differing, placeholder
from replicator.graph.ir.kinds import kind_of
from replicator.graph.ir.placeholder import Call

# The name of an op or a tensor.
_NAME = re.compile(r"([A-Za-z0-9.][A-Za-z0-9_.\\/>-]*)(:\d+)?")
_SMALL = 1024  # elements; larger eager tensors are not compared


def captures(graph: tf.Graph) -> dict[int, tf.Tensor]:
    """Maps the ids of a traced function's captured inputs to the tensors outside."""
    outermost: dict[int, tf.Tensor] = {}
    outer, levels = graph, []
    while getattr(outer, "building_function", False):
        levels.append({id(inner): external for external, inner in outer.captures})
        outer = outer.outer_graph
    for tensor_id, external in levels[0].items() if levels else ():
        for level in levels[1:]:
            external = level.get(id(external), external)
        outermost[tensor_id] = external
    return outermost


def live(
    ops: Sequence[tf.Operation], roots: Iterable[Any], captured: Mapping[int, Any]
) -> list[tf.Operation]:
    """Returns, in order, the ops with an effect or result, and all they depend on.

    Ops that represent a tensor from outside are left out: a placeholder, or a constant
    if the tensor was small and eager. The first op to use such a tensor creates them.
    """
    replica_ops = {
        op for op in ops if not any(id(t) in captured for t in op.outputs[:1])
    }
    live_ops: set[tf.Operation] = set()
    stack = [root if isinstance(root, tf.Operation) else root.op for root in roots]
    for op in ops:
        kind = kind_of(op)
        if kind.stateful or kind.calls or placeholder.read(op) is not None:
            if not _tf.is_abandoned(op):
                stack.append(op)
    while stack:
        op = stack.pop()
        if op in replica_ops and op not in live_ops:
            live_ops.add(op)
            stack += [tensor.op for tensor in op.inputs]
            stack += op.control_inputs
    return [op for op in ops if op in live_ops]


def shared(
    ops: Iterable[tf.Operation],
    other: Container[tf.Operation],
    captured: Container[int],
    own: Container[int],
) -> tuple[set[tf.Operation], tuple[tf.Operation, tf.Operation] | None]:
    """Finds ops of one replica that another uses, and that all replicas may use.

    A layer that is built by its first call may keep tensors computed from constants.

    Args:
        ops: The ops of the replica that uses them.
        other: The ops of the replica that has built them.
        captured: The ids of captures of tensors from outside.
        own: The ids of the tensors from outside that only the builder has.

    Returns:
        The ops, and None; or (an op that is not the same on all replicas, the op that
        uses it).
    """
    found = set[tf.Operation]()
    for op in ops:
        sources = [tensor.op for tensor in op.inputs if id(tensor) not in captured]
        sources += op.control_inputs
        todo = [op for op in sources if op in other and op.type != "Placeholder"]
        while todo:
            source = todo.pop()
            if source in found:
                continue
            if not _is_constant(source) or any(id(t) in own for t in source.inputs):
                return found, (source, op)
            found.add(source)
            inputs = [t.op for t in source.inputs if id(t) not in captured]
            todo += [op for op in inputs if op in other]
    return found, None


def _is_constant(op: tf.Operation) -> bool:
    """Whether an op has the same result on all replicas if its inputs are the same."""
    kind = kind_of(op)
    differs = kind.stateful or kind.calls or placeholder.read(op) is not None
    differs |= op.type == "Placeholder" or differing.ATTRIBUTE in op.node_def.attr
    return not differs and not op.control_inputs


def names(tensors: Iterable[tf.Tensor]) -> Iterable[tuple[int, str]]:
    """Yields (index, name) of the symbolic tensors: eager tensors have no name."""
    for k, tensor in enumerate(tensors):
        if tf.is_symbolic_tensor(tensor):
            yield k, tensor.name


def function_names(values: Sequence[Any]) -> tuple[list[str], list[str]] | None:
    """Returns the functions that two attributes name, if equally many; else None."""
    names = [
        [value.func.name]
        if value.HasField("func")
        else [function.name for function in value.list.func]
        for value in values
    ]
    if not names[0] or len(names[0]) != len(names[1]):
        return None
    return names[0], names[1]


@dataclasses.dataclass(frozen=True)
class Renaming:
    """Rewrites text about one replica as text about another.

    Assertions, for example, hold the names and devices of tensors.

    Attributes:
        scope: The name scopes (from, to).
        device: The devices (from, to).
        names: New names of ops and tensors, which may be outside the scope.
    """

    scope: tuple[str, str]
    device: tuple[str, str]
    names: Mapping[str, str]

    def __call__(self, text: bytes) -> bytes:
        """Returns the text as the other replica would have it."""
        words = text.decode("latin-1")  # any bytes survive the round trip
        words = _NAME.sub(self._renamed, words)
        words = words.replace(*self.scope)
        if self.device[0] in words:
            place = re.escape(self.device[0]) + r"(?!\d)"
            words = re.sub(place, lambda _: self.device[1], words)
        return words.encode("latin-1")

    def _renamed(self, found: re.Match[str]) -> str:
        op, output = found[1], found[2] or ""
        return self.names.get(found[0]) or self.names.get(op, op) + output


def rename(value: Any, renaming: Renaming) -> Any:
    """Returns a string attribute or string constant as another replica has it."""
    copy = type(value)()
    copy.CopyFrom(value)
    if value.HasField("s"):
        copy.s = renaming(value.s)
    elif value.HasField("tensor"):
        for n, text in enumerate(value.tensor.string_val):
            copy.tensor.string_val[n] = renaming(text)
    return copy


def place(one: str, two: str, devices: Sequence[str], replica_id: int) -> str | None:
    """Returns a replica's device, given those of replicas 0 and 1.

    Returns:
        None if the two devices do not correspond.
    """
    if (one, two) == tuple(devices[:2]):
        return devices[replica_id]
    return two if one == two else None


def call_difference(one: Call, two: Call, count: int) -> str:
    """Says why two replicas' calls do not determine those of further ones, or ""."""
    for field in dataclasses.fields(Call):
        name = field.name
        if name not in ("replica_id", "device", "line"):
            if getattr(one, name) != getattr(two, name):
                return f"not the same {name} of {one.primitive}"
    if one.group != tuple(range(count)):
        return f"{one.primitive} in the group {list(one.group)}, not of all replicas"
    if one.options.get("root", 0) > 1:
        return f"{one.primitive} with the root {one.options['root']}, which is a copy"
    if "splits" in one.options:
        return f"{one.primitive} with the sizes of its slices"
    if one.facts.split is not None:
        axis = one.options.get(one.facts.split)
        for value in one.agreed:
            if (
                axis is not None
                and value.shape
                and -len(value.shape) <= axis < len(value.shape)
            ):
                size = value.shape[axis]
                if size is not None and size % count:
                    return f"{one.primitive} with slices that differ in size"
    return ""


def are_alike(ops: Sequence[tf.Operation]) -> bool:
    """Whether ops do the same, on the same type of device, with equally many inputs."""
    first = ops[0]
    attributes: Any = None
    for op in ops[1:]:
        if op is first:
            continue
        if op.type != first.type or len(op.inputs) != len(first.inputs):
            return False
        if _device_type(op.device) != _device_type(first.device):
            return False
        if attributes is None:
            attributes = _attributes(first)
        if _attributes(op) != attributes:
            return False
    return True


def _attributes(op: tf.Operation) -> dict[str, Any]:
    """Returns the attributes that determine what an op does.

    Those with underscores, such as names and compiler annotations, do not.
    """
    return {k: v for k, v in op.node_def.attr.items() if not k.startswith("_")}


@functools.cache
def _device_type(device: str) -> str | None:
    return tf.DeviceSpec.from_string(device).device_type


def hold_the_same(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether small eager tensors have the same value."""
    first = tensors[0]
    for tensor in tensors:
        dtype = tensor.dtype
        numbers = dtype.is_floating or dtype.is_integer or dtype.is_complex
        if tf.is_symbolic_tensor(tensor) or not (numbers or dtype.is_bool):
            return False
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape):
            return False
        if tensor.shape.num_elements() > _SMALL:
            return False
    return all(
        tensor.numpy().tobytes() == first.numpy().tobytes() for tensor in tensors
    )
