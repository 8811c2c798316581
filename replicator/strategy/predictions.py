# SPDX-License-Identifier: Apache-2.0
"""What a node costs in each step: the bytes that travel for it, and the seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from replicator.costs import keeping
from replicator.strategy.facts import Resources
from replicator.strategy.nodes import AllReduceSynchronizer, Node, Synchronizer

ALGORITHMS = {"RING": "ring", "NCCL": "nccl"}
_UNASKED = ("", "NCCL")  # taken only where that was measured: see cost.choose


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What a prediction takes for granted of a step, which nobody says.

    Attributes:
        slots: How many numbers an optimizer keeps for each of a variable's.
        rows: What share of its rows a replica's gradient has, where it is sparse.
    """

    slots: int = 2
    rows: float = 0.01


def predicted(
    node: Node,
    shape: Sequence[int],
    nbytes: int,
    resources: Resources,
    sparse: bool = False,
    assumed: Assumed = Assumed(),
) -> Node:
    """Returns a node with what it costs in a step.

    Args:
        node: The node, which fits the variable.
        shape: That of the variable.
        nbytes: Its size.
        resources: The devices.
        sparse: Whether its gradient is sparse.
        assumed: What else is taken for granted.
    """
    devices = [_full(name) for name in resources.devices]
    rows = assumed.rows if sparse else None

    def load(own: int) -> keeping.Load:
        return keeping.Load(own, assumed.slots, rows)

    calibration = resources.calibration
    if node.axis is None:
        how = node.synchronizer
        assert how is not None, "a whole node has a synchronizer"
        sent = _sent(how, load(nbytes), devices)
        owner = _owner(how)
        if isinstance(how, AllReduceSynchronizer):
            algorithm = None if how.spec in _UNASKED else ALGORITHMS.get(how.spec)
            seconds = keeping.mirrored(load(nbytes), devices, calibration, algorithm)
        else:
            copies = how.local_replication
            seconds = keeping.owned(load(nbytes), devices, owner, calibration, copies)
        return dataclasses.replace(node, sent=sent, seconds=seconds)
    size = shape[node.axis]
    loads = [load(nbytes // max(1, size) * own) for own in node.extents(size)]
    hows = [part.synchronizer for part in node.parts]
    known = [how for how in hows if how is not None]
    return dataclasses.replace(
        node,
        sent=sum(_sent(*each, devices) for each in zip(known, loads, strict=True)),
        seconds=keeping.in_parts(
            loads, [_owner(how) for how in known], devices, calibration
        ),
    )


def step_seconds(nodes: Sequence[Node]) -> float:
    """Returns the seconds of all nodes, one after the other."""
    return math.fsum(node.seconds or 0.0 for node in nodes)


def _sent(how: Synchronizer, load: keeping.Load, devices: Sequence[str]) -> int:
    """Returns how many bytes travel; of what one device has, its value does, too."""
    if isinstance(how, AllReduceSynchronizer):
        others = len(devices) - 1
    else:
        others = len([name for name in devices if name != _owner(how)])
    return 2 * others * load.travels


def _owner(how: Synchronizer) -> str:
    """Returns where a variable is; "" if all replicas have it."""
    if isinstance(how, AllReduceSynchronizer):
        return ""
    return _full(how.reduction_destination)


def _full(device: str) -> str:
    return device if device[:1] == "/" else f"/{device}"
