# SPDX-License-Identifier: Apache-2.0
"""Predicts the cost of a node in each step: the bytes sent, and the seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from replicator.costs import keeping
from replicator.strategy.facts import Resources
from replicator.strategy.nodes import AllReduceSynchronizer, Node, Synchronizer

ALGORITHMS = {"RING": "ring", "NCCL": "nccl"}
_UNASKED = ("", "NCCL")  # used only where measured: see cost.choose


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What predictions assume about a step.

    Attributes:
        slots: The optimizer's number of slots per variable.
        rows: The share of a variable's rows in one replica's sparse gradient.
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
    """Returns a node with its predicted cost in a step.

    Args:
        node: The node, which fits the variable.
        shape: The variable's shape.
        nbytes: The variable's size.
        resources: The devices.
        sparse: Whether the variable's gradient is sparse.
        assumed: Further assumptions.
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
    loads = [load(nbytes // max(1, size) * extent) for extent in node.extents(size)]
    optional = [part.synchronizer for part in node.parts]
    hows = [how for how in optional if how is not None]
    return dataclasses.replace(
        node,
        sent=sum(_sent(*pair, devices) for pair in zip(hows, loads, strict=True)),
        seconds=keeping.in_parts(
            loads, [_owner(how) for how in hows], devices, calibration
        ),
    )


def step_seconds(nodes: Sequence[Node]) -> float:
    """Returns the total seconds of nodes that run one after the other."""
    return math.fsum(node.seconds or 0.0 for node in nodes)


def _sent(how: Synchronizer, load: keeping.Load, devices: Sequence[str]) -> int:
    """Returns the bytes sent; for an owned variable, including its value."""
    if isinstance(how, AllReduceSynchronizer):
        others = len(devices) - 1
    else:
        others = len([name for name in devices if name != _owner(how)])
    return 2 * others * load.travels


def _owner(how: Synchronizer) -> str:
    """Returns the device that owns a variable; "" if it is mirrored."""
    if isinstance(how, AllReduceSynchronizer):
        return ""
    return _full(how.reduction_destination)


def _full(device: str) -> str:
    return device if device[:1] == "/" else f"/{device}"
