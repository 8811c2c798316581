# SPDX-License-Identifier: Apache-2.0
"""Makes descriptions of variables from nodes, and nodes from descriptions."""

from __future__ import annotations

import dataclasses
from typing import Any

from replicator import devices, errors
from replicator.compressors import specs
from replicator.costs import hosts, rates
from replicator.graph.passes.rows import Parts
from replicator.strategy.nodes import Node
from replicator.variables.chooser import Description, VariableFacts
from replicator.variables.placement import Mirrored, Owned, Placement
from replicator.variables.synchronizer import (
    AllReduceSynchronizer,
    PSSynchronizer,
    Synchronizer,
    error,
)
from replicator.world import World


def description(node: Node, facts: VariableFacts, world: World) -> Description:
    """Returns a variable's description according to its node.

    Args:
        node: The node, which fits the variable.
        facts: The variable.
        world: The replicas.

    Raises:
        StrategyError: A device does not exist, or the node needs several processes.
    """
    if node.axis is None:
        return _whole(node, world)
    layout = Parts(node.axis, node.extents(facts.shape[node.axis]))
    parts = tuple(_whole(part, world) for part in node.parts)
    return Description(Mirrored(), layout=layout, parts=parts)


def _whole(node: Node, world: World) -> Description:
    how = node.synchronizer
    assert how is not None, "every part of a node has a synchronizer"
    _check_compressor(node, how.compressor)
    if isinstance(how, AllReduceSynchronizer):
        if how.spec == "NCCL" and not rates.nccl_reaches(world.all_devices):
            how = dataclasses.replace(how, spec="AUTO")
        return Description(Mirrored(), how)
    _refuse(node, how, world)
    device = _existing(node, how.reduction_destination)
    return Description(_owned(device, how.local_replication, world), how)


def _refuse(node: Node, how: PSSynchronizer, world: World) -> None:
    """Raises StrategyError for options that one process cannot carry out."""
    if not how.sync or how.staleness:
        flag = f"staleness={how.staleness}" if how.staleness else "sync=False"
        raise error(
            f"the strategy has {flag} for variable {node.name}, but one process builds "
            "all replicas here, and they step together.",
            "use sync=True and staleness=0; or start one process for each worker, "
            "python -m replicator.launch --mode=async.",
        )
    if world.processes:
        raise error(
            f"the strategy puts variable {node.name} on one device "
            f"({how.reduction_destination}), which is only for programs that one "
            "process builds.",
            "use an all-reduce strategy in between-graph mode.",
        )


def _check_compressor(node: Node, compressor: Any) -> None:
    """Raises StrategyError unless the compressor exists."""
    try:
        specs.compressor("its node", compressor)
    except errors.ArgumentError as problem:
        claim = f"the strategy compresses the gradient of variable {node.name}"
        raise errors.StrategyError(errors.compose_with_prefix(claim, problem)) from None


def _existing(node: Node, device: str) -> str:
    """Returns the full name of the device that a variable is assigned to."""
    try:
        return devices.existing(device)
    except errors.DeviceError as problem:
        claim = f"the strategy puts variable {node.name} on {errors.repr_of(device)}"
        raise errors.DeviceError(errors.compose_with_prefix(claim, problem)) from None


def _owned(device: str, proxies: bool, world: World) -> Placement:
    """Returns the placement of a variable that is owned by one device."""
    if device in world.devices:
        if world.num_replicas == 1:
            return Mirrored()
        return Owned(world.local[world.devices.index(device)], proxies=proxies)
    near = [
        r
        for r, replica_device in zip(world.local, world.devices, strict=True)
        if hosts.host_of(replica_device) == hosts.host_of(device)
    ]
    return Owned((near or world.local)[0], on=device, proxies=proxies)


def described(name: str, variable: Any) -> Node:
    """Returns the node that describes a variable's current placement.

    Args:
        name: The variable's path.
        variable: The ReplicatedVariable, or the PartitionedVariable.
    """
    what = variable.description
    hows = [_synchronizer(part, variable.world) for part in what.parts or (what,)]
    node = Node(name, hows[0])  # a single part may be split later, or never
    if len(hows) > 1:
        node = Node.in_parts(name, what.layout.axis, what.layout.sizes, hows)
    shape = tuple(variable.shape.as_list())
    return dataclasses.replace(node, shape=shape, dtype=variable.dtype.name)


def _synchronizer(what: Description, world: World) -> Synchronizer:
    """Returns the synchronizer of a variable that is where it was decided, or moved."""
    how = what.synchronizer
    compressor = "" if how is None else how.compressor
    if what.placement.owner is None:
        if isinstance(how, AllReduceSynchronizer):
            return how
        return AllReduceSynchronizer(compressor=compressor)
    device = what.placement.device(world)
    if not isinstance(how, PSSynchronizer):
        how = PSSynchronizer(device, compressor=compressor)
    return dataclasses.replace(
        how,
        reduction_destination=device,
        local_replication=what.placement.has_copies,
    )
