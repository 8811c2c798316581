# SPDX-License-Identifier: Apache-2.0
"""Finds which variables a sum over the replicas is for, and has it added up.

A gradient's sum belongs to the variable that is updated by it. The variable's owner,
policy and compressor say how it is communicated, as in every step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf

from replicator._tf import copying
from replicator.forms import updates
from replicator.forms.forms import REPLICATED, Partial
from replicator.forms.propagate import GraphPlan
from replicator.optimizers.totals import Totals

_ADDING = ("Add", "AddV2", "Sub", "AddN")
_SCALING = ("Mul", "RealDiv", "Neg", "Identity", "Cast")


def gradients(plan: GraphPlan) -> Iterator[Any]:
    """Yields references of sums that are added to weights or averages.

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
            yield plan.twins.first(tensor)


def found(
    plan: GraphPlan, given: Sequence[Any], trained: Collection[Any]
) -> dict[Any, list[Any]]:
    """Finds the variables of one owner, if so, that what a sum makes is written to.

    Follows ops that make something of the same shape: from a gradient to the variable,
    or to one of its slots.

    Args:
        plan: The plan of the graph.
        given: Its last inputs: tensors, and the library's variables.
        trained: The variables that strategies decide on.

    Returns:
        The variables, by references of the sums.
    """
    handles = plan.inputs[len(plan.inputs) - len(given) :]
    pairs = zip(handles, given, strict=True)
    variables = {t.ref(): v for t, v in pairs if updates.is_variable(v)}
    whose = {id(slot): v for v in trained for slot in _slots(v)}
    found: dict[Any, dict[int, Any]] = {}
    for op in reversed(list(plan.plans)):
        behind = [variables.get(t.ref()) for t in op.inputs if t.dtype == tf.resource]
        is_read = op.type == "ReadVariableOp"
        written = [v for v in behind if v is not None and not is_read]
        for tensor in op.inputs:
            shape = tensor.shape
            if tensor.dtype == tf.resource or not shape.rank:
                continue
            reached = found.setdefault(plan.twins.first(tensor), {})
            own = [whose.get(id(v), v) for v in written if v.shape == shape]
            reached.update({id(v): v for v in own})
            for out in op.outputs:
                if out.shape == shape:
                    reached.update(found.get(plan.twins.first(out), {}))
    return {
        ref: list(homes.values())
        for ref, homes in found.items()
        if len({getattr(v, "owner", None) for v in homes.values()}) == 1
    }


def _slots(variable: Any) -> Iterator[Any]:
    """Yields what optimizers keep for a variable."""
    if hasattr(variable, "storage"):
        yield from variable.storage.slots()
    else:  # in parts
        yield from (slot for ref in variable.slots if (slot := ref()) is not None)


class Sums:
    """Adds up sums over the replicas, each as its variables ask for.

    Args:
        variables: The variables that sums are for, by references of the sums.
        totals: Adds up, in all builds of the program.
    """

    def __init__(self, variables: dict[Any, list[Any]], totals: Totals) -> None:
        self._variables, self._totals = variables, totals
        self._attributes: dict[tf.Operation, Any] = {}

    def added(
        self, tensors: Sequence[tf.Tensor | None], own: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns what tensors of all replicas add up to.

        They are added in one call, which the library divides into buckets.

        Args:
            tensors: Of the graph for one device; None: of no tensor of that.
            own: The summands of this replica.
        """
        return self._totals.add_up(own, list(map(self._home, tensors)))

    def _home(self, tensor: tf.Tensor | None) -> Any:
        homes = None if tensor is None else self._variables.get(tensor.ref())
        return homes[0] if homes else None

    def attributes(self, op: tf.Operation) -> Any:
        """Returns the attributes of an op, which are read once for all replicas."""
        if op not in self._attributes:
            self._attributes[op] = copying.attributes_of(op)
        return self._attributes[op]
