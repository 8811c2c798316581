# SPDX-License-Identifier: Apache-2.0
"""Measures what replicas read of variables on the devices of others.

A variable with an owner and no copies exists once, so that each read by another replica
sends its value, or some of its rows, without a call that asks for it: the pull of a
parameter server (Li et al. 2014). Runs after reads.py, which makes replicas share reads
and the values of variables in parts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Set
from typing import Any

import tensorflow as tf

from replicator._tf import ops
from replicator.costs import cost
from replicator.graph.ir.kinds import has_effect, kind_of
from replicator.graph.lowering import record
from replicator.graph.order.effects import may_write
from replicator.world import World


def nbytes(
    variables: Iterable[Any],
    graph: Any,
    world: World,
    leaves: Iterable[Any],
    pruned: Set[tf.Operation] = frozenset(),
) -> int | None:
    """Returns the bytes that reads send to other replicas; None if a size is unknown.

    A value is sent once to each device on which something uses it. Reads inside
    conditionals, loops and functions are not counted.

    Args:
        variables: The ReplicatedVariables that the step uses.
        graph: The graph that the step is built into.
        world: All replicas, and which of them are built here.
        leaves: The results of the step.
        pruned: Ops of the graph that will not run.
    """
    homes = _homes(variables, graph, world, pruned)
    results = {leaf.op for leaf in leaves if tf.is_tensor(leaf)}
    devices = {world.device(r) for r in world.local}
    sizes: list[int | None] = []
    values = [(ref.deref(), home) for ref, home in homes.items()]
    while values:
        value, home = values.pop()
        users = [
            op
            for op in value.consumers()
            if op not in pruned and (op in results or _has_use(op))
        ]
        elsewhere = devices.intersection(op.device for op in users) - {home}
        sizes += [cost.known_bytes(value)] * len(elsewhere)
        for op in users:
            at = op.device or home
            if _passes_on(op, homes) and op.outputs[0].ref() not in homes:
                homes[op.outputs[0].ref()] = at
                values.append((op.outputs[0], at))
    return record.add(sizes)


def _homes(
    variables: Iterable[Any], graph: Any, world: World, pruned: Set[tf.Operation]
) -> dict[Any, str]:
    """Returns the device of each value that is read, by the value's reference.

    Args:
        variables: See `nbytes`; those without an owner, or with copies, are ignored.
        graph: See `nbytes`.
        world: See `nbytes`.
        pruned: See `nbytes`.
    """
    in_function, captures = graph.building_function, {}
    if in_function:  # looked up: to capture a handle anew would change the graph
        captures = {id(outside): inside for outside, inside in graph.captures}
    homes: dict[Any, str] = {}
    for variable in variables:
        if variable.placement.owner is None or variable.placement.has_copies:
            continue
        handle = variable.storage.first.handle
        inside = captures.get(id(handle)) if in_function else handle
        # The top level may not use it: nothing does, or only inner functions do.
        if inside is not None and inside.graph is graph:
            home = variable.placement.device(world)
            homes.update((x.ref(), home) for x in _reads(inside, pruned))
    return homes


def _reads(handle: tf.Tensor, pruned: Set[tf.Operation]) -> Iterator[tf.Tensor]:
    """Yields what ops read of a variable at the top level of a graph."""
    for op in handle.consumers():
        if op in pruned or ops.is_abandoned(op) or kind_of(op).calls or may_write(op):
            continue
        yield from op.outputs


def _has_use(op: tf.Operation) -> bool:
    """Whether an op is run, as far as the next ops tell."""
    return (
        has_effect(op)
        or any(tensor.consumers() for tensor in op.outputs)
        or bool(ops.control_outputs(op))
    )


def _passes_on(op: tf.Operation, homes: Container[Any]) -> bool:
    """Whether an op passes on a value that was read, or joins the parts of one."""
    if op.type == "ConcatV2":
        return all(tensor.ref() in homes for tensor in op.inputs[:-1])
    return op.type == "Identity" and not op.device
