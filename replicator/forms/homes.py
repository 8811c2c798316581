# SPDX-License-Identifier: Apache-2.0
"""Finds which variables a sum over the replicas is for, and has it added up.

A gradient's sum belongs to the variable that is updated by it. The variable's owner,
policy and compressor say how it is communicated, as in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator import _tf
from replicator.compressors import reducing, specs
from replicator.compressors.memory import Memory, Place
from replicator.forms.forms import REPLICATED, Partial
from replicator.forms.propagate import GraphPlan
from replicator.graph.ir.placeholder import NO_POLICY

_ADDING = ("Add", "AddV2", "Sub", "AddN")
_SCALING = ("Mul", "RealDiv", "Neg", "Identity", "Cast")


def gradients(plan: GraphPlan) -> Iterator[Any]:
    """Yields references of sums that are added to weights, averages: what is replicated.

    Later they would be sums of as many bytes, but no longer of gradients alone, which
    may be compressed. Scaling is left to come after the sum.
    """

    def is_sum(tensor: tf.Tensor) -> bool:
        return isinstance(plan.fact(tensor).form, Partial)

    for op in plan.plans:
        if op.type not in _ADDING:
            continue
        shape = op.outputs[0].shape
        if not any(
            plan.fact(t).form == REPLICATED and t.shape == shape for t in op.inputs
        ):
            continue
        for tensor in op.inputs:
            if not is_sum(tensor) or not tensor.shape.rank:
                continue
            while tensor.op.type in _SCALING:
                same = [
                    t for t in tensor.op.inputs if is_sum(t) and t.shape == tensor.shape
                ]
                if len(same) != 1:
                    break
                tensor = same[0]
            yield tensor.ref()


def of_sums(
    plan: GraphPlan, variables: dict[Any, Any], trained: Sequence[Any]
) -> dict[Any, list[Any]]:
    """Finds the variables of one owner, if so, that what a sum makes is written to.

    Follows ops that make something of the same shape: from a gradient to the variable,
    or to one of its slots.

    Args:
        plan: The plan of the graph.
        variables: The library's variables, by references of their handles.
        trained: Those that strategies decide on.
    """
    whose = {
        id(slot): v
        for v in trained
        if hasattr(v, "storage")
        for slot in v.storage.slots()
    }
    found: dict[Any, dict[int, Any]] = {}
    for op in reversed(list(plan.plans)):
        behind = [variables.get(t.ref()) for t in op.inputs if t.dtype == tf.resource]
        is_read = op.type == "ReadVariableOp"
        written = [v for v in behind if v is not None and not is_read]
        for tensor in op.inputs:
            shape = tensor.shape
            if tensor.dtype == tf.resource or not shape.rank:
                continue
            reached = found.setdefault(tensor.ref(), {})
            own = [whose.get(id(v), v) for v in written if v.shape == shape]
            reached.update({id(v): v for v in own})
            for out in op.outputs:
                if out.shape == shape:
                    reached.update(found.get(out.ref(), {}))
    return {
        ref: list(homes.values())
        for ref, homes in found.items()
        if len({getattr(v, "owner", None) for v in homes.values()}) == 1
    }


def _compressor(homes: Sequence[Any]) -> Any:
    """Returns the compressor that a strategy has for a variable's gradient, or None."""
    for v in homes:
        asked = getattr(getattr(v, "storage", None), "synchronizer", None)
        if asked is not None and asked.compressor not in (None, ""):
            return specs.compressor(f"the synchronizer of {v.name}", asked.compressor)
    return None


class Sums:
    """Adds up sums over the replicas, each as its variables ask for.

    Args:
        variables: The variables that sums are for, by references of the sums.
        memory: What compressors remember.
    """

    def __init__(self, variables: dict[Any, list[Any]], memory: Memory) -> None:
        self._variables, self._memory = variables, memory
        self._attributes: dict[tf.Operation, Any] = {}

    def added(
        self, replica: Any, tensors: Sequence[tf.Tensor], own: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns what tensors of all replicas add up to.

        They are added in one call, which the library divides into buckets.

        Args:
            replica: The replica that is built, a context.ReplicaContext.
            tensors: Of the graph for one device.
            own: The summands of this replica.
        """
        homes = [self._variables.get(tensor.ref(), []) for tensor in tensors]
        policies = [home[0].policy if home else NO_POLICY for home in homes]
        group = self._memory.group(str([(t.shape, t.dtype) for t in own]))
        place = Place(group, "a function", replica.creating_for_all)
        call = reducing.Call("sum", tuple(range(replica.num_replicas)), None, place)
        return reducing.reduce(call, own, list(map(_compressor, homes)), policies)

    def attributes(self, op: tf.Operation) -> Any:
        """Returns the attributes of an op, which are read once for all replicas."""
        if op not in self._attributes:
            self._attributes[op] = _tf.attributes_of(op)
        return self._attributes[op]
