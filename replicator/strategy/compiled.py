# SPDX-License-Identifier: Apache-2.0
"""Translates nodes to placements and synchronizers, and back.

The only module that knows both.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from replicator import devices, errors
from replicator.compressors import specs
from replicator.costs import hosts, rates
from replicator.strategy import predictions
from replicator.strategy.nodes import (
    AllReduceSynchronizer,
    Node,
    PSSynchronizer,
    error,
)
from replicator.variables import synchronizer
from replicator.variables.chooser import Chosen, Part, VariableFacts
from replicator.variables.placement import Mirrored, Owned, Placement
from replicator.world import World


def chosen(node: Node, facts: VariableFacts, world: World) -> Chosen:
    """Returns a variable's placement and synchronizer according to its node.

    Args:
        node: The node, which fits the variable.
        facts: The variable.
        world: The replicas.

    Raises:
        StrategyError: A device does not exist, or the node needs several processes.
    """
    if node.axis is None:
        return Chosen(*_compiled(node, world))
    sizes = node.extents(facts.shape[node.axis])
    parts = tuple(
        Part(size, *_compiled(part, world))
        for size, part in zip(sizes, node.parts, strict=True)
    )
    return Chosen(Mirrored(), parts=parts, axis=node.axis)


def _compiled(
    node: Node, world: World
) -> tuple[Placement, synchronizer.AllReduce | synchronizer.ParameterServer]:
    how = node.synchronizer
    assert how is not None, "every part of a node has a synchronizer"
    _check_compressor(node, how.compressor)
    if isinstance(how, AllReduceSynchronizer):
        # The group determines which gradients may share a bucket.
        algorithm = predictions.ALGORITHMS.get(how.spec)
        if algorithm == "nccl" and not rates.nccl_reaches(world.all_devices):
            algorithm = None
        bucket = str(how.group)
        return Mirrored(), synchronizer.AllReduce(algorithm, bucket, how.compressor)
    _refuse(node, how, world)
    device = _existing(node, how.reduction_destination)
    server = synchronizer.ParameterServer(how.sync, how.staleness, how.compressor)
    return _owned(device, how.local_replication, world), server


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
        claim = f"the strategy puts variable {node.name} on {errors.shown(device)}"
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
    parts = getattr(variable, "parts", ())
    synchronizers = [_described(part) for part in parts or (variable,)]
    node = Node(name, synchronizers[0])  # a single part may be split later, or never
    if len(parts) > 1:
        node = Node.in_parts(name, variable.axis, variable.sizes, synchronizers)
    shape = tuple(variable.shape.as_list())
    return dataclasses.replace(node, shape=shape, dtype=variable.dtype.name)


def _described(variable: Any) -> PSSynchronizer | AllReduceSynchronizer:
    placement, how = variable.placement, variable.storage.synchronizer
    if placement.owner is not None:
        device = placement.device(variable.world)
        sync, staleness = getattr(how, "sync", True), getattr(how, "staleness", 0)
        return PSSynchronizer(
            device, placement.has_copies, sync, staleness, how.compressor
        )
    names = {algorithm: spec for spec, algorithm in predictions.ALGORITHMS.items()}
    spec = names.get(how.algorithm or "", "AUTO")
    return AllReduceSynchronizer(spec, how.compressor, int(how.bucket or 0))
