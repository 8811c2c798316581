"""What nodes are to variables: placements and synchronizers, and back again.

The only place that knows both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from replicator import devices
from replicator.costs import cost, hosts, rates
from replicator.strategy.facts import Resources
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

_ALGORITHMS = {"RING": "ring", "NCCL": "nccl"}


def chosen(node: Node, facts: VariableFacts, world: World) -> Chosen:
    """Returns where a variable is, and how it is kept equal, as its node says.

    Args:
        node: The node, which fits the variable.
        facts: The variable.
        world: The replicas.

    Raises:
        StrategyError: It needs what there is not: a device, or several processes.
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
    if isinstance(how, AllReduceSynchronizer):
        # The group says with what a gradient may travel.
        algorithm = _ALGORITHMS.get(how.spec)
        if algorithm == "nccl" and not rates.are_gpus(world.everywhere):
            algorithm = None
        bucket = str(how.group)
        return Mirrored(), synchronizer.AllReduce(algorithm, bucket, how.compressor)
    assert isinstance(how, PSSynchronizer), "every part of a node has a synchronizer"
    _refuse(node, how, world)
    device = devices.existing(how.reduction_destination)
    made = synchronizer.ParameterServer(how.sync, how.staleness, how.compressor)
    return _owned(device, how.local_replication, world), made


def _refuse(node: Node, how: PSSynchronizer, world: World) -> None:
    """Raises StrategyError for what this process cannot do by itself."""
    if not how.sync or how.staleness:
        what = f"staleness={how.staleness}" if how.staleness else "sync=False"
        raise error(
            f"the strategy has {what} for variable {node.name}, but one process builds "
            "all replicas here, and they step together.",
            "use sync=True and staleness=0; or start one process for each worker, "
            "python -m replicator.launch --mode=async.",
        )
    if world.processes:
        raise error(
            f"the strategy puts variable {node.name} on one device "
            f"({how.reduction_destination}), which is for programs that one process "
            "builds.",
            "in between-graph mode, use strategies of all-reduce.",
        )


def _owned(device: str, proxies: bool, world: World) -> Placement:
    """Returns the placement of a variable that is on one device."""
    if device in world.devices:
        if world.num_replicas == 1:
            return Mirrored()
        return Owned(world.local[world.devices.index(device)], proxies=proxies)
    near = [
        r
        for r, own in zip(world.local, world.devices, strict=True)
        if hosts.host_of(own) == hosts.host_of(device)
    ]
    return Owned((near or world.local)[0], on=device, proxies=proxies)


def described(name: str, variable: Any, resources: Resources) -> Node:
    """Returns the node of a variable as it is now.

    Args:
        name: Its path.
        variable: The ReplicatedVariable.
        resources: The devices.
    """
    parts = getattr(variable, "parts", ())
    hows = [_described(one) for one in parts or (variable,)]
    sizes = [_nbytes(one) for one in parts or (variable,)]
    costs = [
        _predicted(how, nbytes, resources)
        for how, nbytes in zip(hows, sizes, strict=True)
    ]
    node = Node(name, hows[0])
    if parts:
        node = Node.in_parts(name, variable.axis, variable.sizes, hows)
    return dataclasses.replace(
        node,
        shape=tuple(variable.shape.as_list()),
        dtype=variable.dtype.name,
        sent=sum(sent for sent, _ in costs),
        seconds=sum(seconds for _, seconds in costs),
    )


def _nbytes(variable: Any) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)


def _described(variable: Any) -> PSSynchronizer | AllReduceSynchronizer:
    placement, how = variable.placement, variable.storage.synchronizer
    if placement.owner is not None:
        device = placement.device(variable.world)
        sync, staleness = getattr(how, "sync", True), getattr(how, "staleness", 0)
        return PSSynchronizer(
            device, placement.has_copies, sync, staleness, how.compressor
        )
    names = {algorithm: spec for spec, algorithm in _ALGORITHMS.items()}
    spec = names.get(how.algorithm or "", "AUTO")
    return AllReduceSynchronizer(spec, how.compressor, int(how.bucket or 0))


def _predicted(
    how: PSSynchronizer | AllReduceSynchronizer, nbytes: int, resources: Resources
) -> tuple[int, float]:
    """Returns how much travels for a dense gradient in a step, and for how long.

    Of a variable that all read where it is, or have copies of, its value travels, too.
    """
    names = resources.devices
    if len(names) == 1 and isinstance(how, AllReduceSynchronizer):
        return 0, 0.0
    kind = rates.kind_of(names)
    algorithm = "hub"
    if isinstance(how, AllReduceSynchronizer):
        able = [name for name in cost.ALGORITHM_NAMES if name != "nccl"]
        asked = _ALGORITHMS.get(how.spec) if how.spec != "NCCL" else None
        policy = cost.Policy(calibration=resources.calibration)
        algorithm = cost.choose(policy, asked, able, nbytes, names)
    others = _others(how, names)
    seconds = resources.calibration.seconds(algorithm, kind, others + 1, nbytes)
    return 2 * others * nbytes, seconds


def _others(how: PSSynchronizer | AllReduceSynchronizer, names: Sequence[str]) -> int:
    """Returns how many replicas are elsewhere than where a gradient is reduced."""
    if isinstance(how, AllReduceSynchronizer):
        return len(names) - 1
    return len([name for name in names if name != how.reduction_destination])
