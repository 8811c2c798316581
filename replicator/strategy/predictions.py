# SPDX-License-Identifier: Apache-2.0
"""Predicts the cost of a node in each step: the bytes sent, and the seconds."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Hashable, Mapping, Sequence

from replicator.costs import variable_cost
from replicator.strategy.facts import Resources
from replicator.strategy.nodes import Node
from replicator.variables.synchronizer import (
    ALGORITHMS,
    AllReduceSynchronizer,
    Synchronizer,
)

_UNASKED = ("", "NCCL")  # used only where measured: see cost.choose


@dataclasses.dataclass(frozen=True)
class Assumed:
    """What predictions assume about a step.

    Example:
        >>> replicator.strategy.Auto(slots=1).assumed  # SGD with momentum
        Assumed(slots=1, rows=0.01)

    Attributes:
        slots: The optimizer's number of slots per variable: 2 for Adam.
        rows: The share of a variable's rows in one replica's sparse gradient, more than
            0, at most 1.
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
    together: Mapping[Hashable, int] | None = None,
) -> Node:
    """Returns a node with its predicted cost in a step.

    Args:
        node: The node, which fits the variable.
        shape: The variable's shape.
        nbytes: The variable's size.
        resources: The devices.
        sparse: Whether the variable's gradient is sparse.
        assumed: Further assumptions.
        together: The bytes of all gradients that travel in each way, this variable's
            included; None: other gradients fill the messages.
    """
    devices = [_full(name) for name in resources.devices]
    calibration = resources.calibration
    hows, loads = [], []
    for how, load in _loads(node, shape, nbytes, sparse, assumed):
        company = None if together is None else together[_way(how, load)]
        hows.append(how)
        loads.append(dataclasses.replace(load, shared_nbytes=company))
    sent = sum(_sent(*pair, devices) for pair in zip(hows, loads, strict=True))
    if node.axis is not None:
        owners = [_owner(how) for how in hows]
        seconds = variable_cost.in_parts(loads, owners, devices, calibration)
    elif isinstance(hows[0], AllReduceSynchronizer):
        spec = hows[0].spec
        algorithm = None if spec in _UNASKED else ALGORITHMS.get(spec)
        seconds = variable_cost.mirrored(loads[0], devices, calibration, algorithm)
    else:
        owner, copies = _owner(hows[0]), hows[0].local_replication
        seconds = variable_cost.owned(loads[0], devices, owner, calibration, copies)
    return dataclasses.replace(node, sent=sent, seconds=seconds)


def predicted_together(
    nodes: Sequence[Node],
    resources: Resources,
    known: Sequence[tuple[bool, Assumed]],
) -> list[Node]:
    """Returns all nodes of a strategy with their predicted costs in a step.

    Small gradients that travel in the same way share messages, of which there is at
    least one.

    Args:
        nodes: The nodes, with the shapes and dtypes of their variables.
        resources: The devices.
        known: For each node, whether the gradient is sparse, and further assumptions.
    """
    together: collections.Counter[Hashable] = collections.Counter()
    facts = []
    for node, (sparse, assumed) in zip(nodes, known, strict=True):
        assert node.shape is not None and node.nbytes is not None, "of a variable"
        facts.append((node, node.shape, node.nbytes))
        for how, load in _loads(*facts[-1], sparse, assumed):
            together[_way(how, load)] += load.travels
    return [
        predicted(*fact, resources, sparse, assumed, together)
        for fact, (sparse, assumed) in zip(facts, known, strict=True)
    ]


def _loads(
    node: Node, shape: Sequence[int], nbytes: int, sparse: bool, assumed: Assumed
) -> list[tuple[Synchronizer, variable_cost.Load]]:
    """Returns how a variable, or each of its parts, is kept equal, and its load."""
    rows = assumed.rows if sparse else None
    if node.axis is None:
        assert node.synchronizer is not None, "a whole node has a synchronizer"
        return [(node.synchronizer, variable_cost.Load(nbytes, assumed.slots, rows))]
    size = shape[node.axis]
    slice_bytes = nbytes // max(1, size)
    return [
        (
            part.synchronizer,
            variable_cost.Load(slice_bytes * extent, assumed.slots, rows),
        )
        for part, extent in zip(node.parts, node.extents(size), strict=True)
        if part.synchronizer is not None
    ]


def _way(how: Synchronizer, load: variable_cost.Load) -> Hashable:
    """Returns what gradients have in common that may share messages."""
    algorithm = how.spec if isinstance(how, AllReduceSynchronizer) else ""
    return _owner(how), algorithm, load.rows is not None


def step_seconds(nodes: Sequence[Node]) -> float:
    """Returns the total seconds of nodes that run one after the other."""
    return math.fsum(node.seconds or 0.0 for node in nodes)


def _sent(how: Synchronizer, load: variable_cost.Load, devices: Sequence[str]) -> int:
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
